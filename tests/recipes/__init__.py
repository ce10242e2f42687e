"""Tests of programs: their tables, the matcher, the partition map."""

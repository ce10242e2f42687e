"""Regions whose home is lost get another one."""

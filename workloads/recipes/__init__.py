"""Workloads as programs that run without the driver. In: a program that is being described, data,
parameters. Out: its stages, and the datasets that have the answer.

A function `describe_…` only describes: whoever has called it runs the program.
"""

"""Whole models: rules choose the format of each leaf, and a report compares sizes and values before and after."""

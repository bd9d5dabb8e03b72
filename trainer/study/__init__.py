"""A study: several configurations, each trained with many seeds, and the statistics of their differences."""

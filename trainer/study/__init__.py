"""A study: one configuration after another, trained with many seeds, and what may be said of their differences."""

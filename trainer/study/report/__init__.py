"""The report of a study: findings, tables, figures, and the check of a stored one."""

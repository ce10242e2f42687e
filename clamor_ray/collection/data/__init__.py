"""What a partition holds: blocks of items, keys, joins, order, sums. Pure."""

"""The kernel families, and what dispatch, plans and programs ask of them. Most families have their own file."""

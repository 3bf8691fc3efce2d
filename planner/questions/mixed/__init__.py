"""``plan --cluster`` and its companions on mixed plans: tables."""

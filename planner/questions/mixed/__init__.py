"""Mixed clusters: tables of layouts on several kinds and sites."""

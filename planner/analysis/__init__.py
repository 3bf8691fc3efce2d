"""The numbers behind reports: timelines, what-if, sensitivity, comparisons; nothing here prints or draws."""

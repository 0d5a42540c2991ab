"""Where changes come from: messages of a range that can be planned, and read again."""

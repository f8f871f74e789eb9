"""The draft's vocabulary: which target tokens it can say."""

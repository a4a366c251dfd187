//! The queue by itself: pieces, memory, ends.

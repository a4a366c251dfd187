//! The one binary: serve, reach and measure volumes.
fn main() {}

//! What is fuzzed: one plain function of bytes each, which panics when a property does not hold.
//!
//! ```text
//!   fuzz/corpus/NAME/* ──▶ tests/corpus.rs   every input once, in `cargo test`
//!                      ──▶ src/main.rs       mutated at random for a while, on a stable compiler
//!                      ──▶ ../src/main.rs    libFuzzer with coverage and AddressSanitizer, on a nightly one
//! ```
//! To add a target: write a function in a module here, name it in [`TARGETS`], and put a few inputs that reach
//! different branches into `fuzz/corpus/NAME/`. An input that once found a fault goes there too, under a name that
//! says what it found.
#![forbid(unsafe_code)]

mod outbox;

/// A function under fuzz.
#[derive(Debug)]
pub struct Target {
    /// Its name on the command line, and its directory under `fuzz/corpus`.
    pub name: &'static str,
    /// Panics when a property does not hold for these bytes.
    pub run: fn(&[u8]),
}

/// Every target, in order of name.
pub const TARGETS: &[Target] = &[Target { name: "outbox", run: outbox::outbox }];

impl Target {
    /// The target of this name, if there is one.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Target> {
        TARGETS.iter().find(|target| target.name == name)
    }
}

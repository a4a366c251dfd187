//! Sessions against a controller by hand, cut at every byte, and one that does what none may.
#![allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "either fails the test")]

mod admin;
mod hostile;
mod pair;
mod queue;
mod script;

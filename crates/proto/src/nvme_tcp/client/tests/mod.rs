//! Sessions with a scripted controller, with bytes split at every position, and with a controller
//! that violates the protocol.
#![allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "either fails the test")]

mod admin;
mod hostile;
mod pair;
mod queue;
mod script;

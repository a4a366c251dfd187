//! Whole sessions: against our own target, cut at every byte, and against one by hand that does
//! what ours never would.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod aborts;
mod commands;
mod connections;
mod events;
mod levels;
mod logins;
mod pairs;
mod recovery;
mod script;

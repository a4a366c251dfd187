//! Tests of whole initiator sessions: with this crate's target, split at every byte, and with a
//! scripted target that misbehaves.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod aborts;
mod commands;
mod connections;
mod discovery;
mod events;
mod levels;
mod logins;
mod pairs;
mod recovery;
mod script;

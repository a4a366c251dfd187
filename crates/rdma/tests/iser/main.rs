//! iSER, both sides over the provider in memory, or over iWARP (`streams`): the initiator's
//! session, the target's, and volumes behind it.
#![allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "an overflow fails the test")]
#![allow(clippy::unwrap_used, reason = "a test")]

mod bench;
mod cuts;
mod linux;
mod pairs;
mod protocol_rules;
mod registered;
mod streams;
mod targets;

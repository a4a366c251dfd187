//! iSER: initiator session, target session and volumes, over the in-memory provider or over iWARP
//! (`streams`).
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

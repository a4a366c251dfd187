//! The conformance suite for providers.
//!
//! A provider supplies a [`Wire`]: both ends of one connection, and the transport between them.
//! ```
//! # use blockmux_rdma::{Provider, conformance::{self, Side, Wire}, loopback::{self, Loopback}};
//! struct Memory(Loopback, Loopback);
//! impl Wire for Memory {
//!     fn end(&mut self, side: Side) -> &mut dyn Provider {
//!         if side == Side::Active { &mut self.0 } else { &mut self.1 }
//!     }
//!     fn turn(&mut self) -> bool { false }
//!     fn break_connection(&mut self) { self.0.break_after(0) }
//! }
//! let mut seed = 0;
//! conformance::run(&mut |active, passive| {
//!     seed += 1;
//!     let (active, passive) = loopback::pair(active, passive, [seed; 32]);
//!     Box::new(Memory(active, passive))
//! });
//! ```
//! Each case creates its own connections, with suitable endpoints. A failure names the case and its
//! parameters.

mod connections;
mod memory;
mod messages;
mod pair;
mod random;
mod refusals;

use crate::queue_pair::{Provider, Violation};
use blockmux_proto::rdma::Endpoint;

/// Both ends of a new connection, and the transport between them.
pub trait Wire {
    /// Returns one of the ends.
    fn end(&mut self, side: Side) -> &mut dyn Provider;

    /// Transports some data between the ends; returns `false` if there was none, or if the provider
    /// needs no transport.
    fn turn(&mut self) -> bool;

    /// Loses the connection, with all data in transit. The ends may notice at the next turns.
    fn break_connection(&mut self);

    /// Whether private data arrives with zeroes behind it.
    fn pads_private_data(&self) -> bool {
        false
    }

    /// What the peer's end reports as its own fault when this violation was refused. A protocol may
    /// have fewer codes than there are violations.
    fn reported(&self, violation: Violation) -> Violation {
        violation
    }
}

/// One side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that connects.
    Active,
    /// The side that accepts the connection.
    Passive,
}

impl Side {
    /// Both sides.
    const BOTH: [Side; 2] = [Side::Active, Side::Passive];

    fn other(self) -> Side {
        match self {
            Side::Active => Side::Passive,
            Side::Passive => Side::Active,
        }
    }
}

/// Creates a connection between an active and a passive endpoint, each with its own steering tags.
pub type Connect<'a> = dyn FnMut(&Endpoint, &Endpoint) -> Box<dyn Wire> + 'a;

/// Runs all cases.
///
/// # Panics
/// If the provider fails a case; the message names it.
pub fn run(connect: &mut Connect) {
    for (name, case) in CASES {
        if let Err(what) = case(connect) {
            panic!("conformance: {name}: {what}");
        }
    }
}

type CaseResult<T = ()> = Result<T, String>;
type ConformanceCase = fn(&mut Connect) -> CaseResult;

const CASES: &[(&str, ConformanceCase)] = &[
    ("private data of every length arrives both ways", connections::private_data_arrives),
    ("a rejected peer gets the reason", connections::a_rejected_peer_gets_the_reason),
    ("the endpoints get what they ask for", connections::endpoints_get_what_they_ask_for),
    ("messages of every length arrive whole and in order", messages::every_length_arrives),
    ("a message in pieces arrives in one", messages::pieces_arrive_in_one),
    ("a queue is as deep as its endpoint says", messages::a_queue_is_as_deep_as_it_says),
    ("completed work releases its memory", messages::completed_work_releases_its_memory),
    ("written data is in place before the next message", memory::writes_come_before_messages),
    ("reads of every length fetch every byte", memory::reads_fetch_every_byte),
    ("reads beyond the limit wait", memory::reads_beyond_the_limit_wait),
    ("work posted after a read is done", memory::work_behind_a_read_is_done),
    ("both sides read at once", memory::both_sides_read_at_once),
    ("memory may be registered before there is a connection", memory::registrations_before_the_connection),
    ("a message invalidates the peer's memory", memory::a_message_invalidates_memory),
    ("as many registrations may exist as the endpoint says", memory::registrations_are_bounded),
    ("access to memory that was not granted is refused", refusals::ungranted_memory_is_refused),
    ("access to invalidated memory is refused", refusals::invalidated_memory_is_refused),
    ("tags of another connection are invalid", refusals::foreign_tags_are_refused),
    ("a message cannot invalidate an invalid tag", refusals::invalidating_an_invalid_tag),
    ("a message without a receive buffer ends the connection", refusals::no_receive_buffer),
    ("a message that is too long ends the connection", refusals::a_message_too_long),
    ("work that cannot be done fails", refusals::impossible_work_fails),
    ("disconnect finishes posted work", connections::disconnect_finishes_posted_work),
    ("disconnect is reported once", connections::disconnect_is_reported_once),
    ("a lost connection completes all work once", connections::a_loss_completes_all_work),
    ("random traffic agrees with a model", random::agrees_with_a_model),
];

macro_rules! fail {
    ($($what:tt)*) => { Err(format!($($what)*)) };
}
use fail;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{self, Loopback};

    struct Memory(Loopback, Loopback);

    impl Wire for Memory {
        fn end(&mut self, side: Side) -> &mut dyn Provider {
            if side == Side::Active { &mut self.0 } else { &mut self.1 }
        }

        fn turn(&mut self) -> bool {
            false
        }

        fn break_connection(&mut self) {
            self.0.break_after(0);
        }
    }

    #[test]
    fn the_loopback_conforms() {
        let mut seed = 0;
        run(&mut |active, passive| {
            seed += 1;
            let (active, passive) = loopback::pair(active, passive, [seed; 32]);
            Box::new(Memory(active, passive))
        });
    }
}

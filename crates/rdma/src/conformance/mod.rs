//! The suite that every provider must pass.
//!
//! A provider comes with a [`Wire`]: both ends of one connection, and what carries bytes between
//! them.
//! ```
//! # use blockmux_rdma::{Provider, conformance::{self, Side, Wire}, loopback::{self, Loopback}};
//! struct Memory(Loopback, Loopback);
//! impl Wire for Memory {
//!     fn end(&mut self, side: Side) -> &mut dyn Provider {
//!         if side == Side::Active { &mut self.0 } else { &mut self.1 }
//!     }
//!     fn turn(&mut self) -> bool { false }
//!     fn cut(&mut self) { self.0.cut_after(0) }
//! }
//! let mut seed = 0;
//! conformance::run(&mut |active, passive| {
//!     seed += 1;
//!     let (active, passive) = loopback::pair(active, passive, [seed; 32]);
//!     Box::new(Memory(active, passive))
//! });
//! ```
//! Each case makes connections of its own, with endpoints that suit it, and says what went wrong
//! with which numbers.

mod connections;
mod memory;
mod messages;
mod pair;
mod random;
mod refusals;

use crate::queue_pair::Provider;
use blockmux_proto::rdma::Endpoint;

/// Both ends of a connection that is about to be made, and what is between them.
pub trait Wire {
    /// One of the ends.
    fn end(&mut self, side: Side) -> &mut dyn Provider;

    /// Carries some of what the ends have for each other; `false` if there was nothing. A provider
    /// whose ends need no carrying always answers that.
    fn turn(&mut self) -> bool;

    /// The connection is lost, with all that is under way. Both ends may learn of it as late as by
    /// the next turns.
    fn cut(&mut self);
}

/// One of two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that connects.
    Active,
    /// The one that is connected to.
    Passive,
}

impl Side {
    /// Both.
    const BOTH: [Side; 2] = [Side::Active, Side::Passive];

    fn other(self) -> Side {
        match self {
            Side::Active => Side::Passive,
            Side::Passive => Side::Active,
        }
    }
}

/// Makes a connection between the active and the passive endpoint. Each has names of its own for
/// memory.
pub type Connect<'a> = dyn FnMut(&Endpoint, &Endpoint) -> Box<dyn Wire> + 'a;

/// Runs all cases.
///
/// # Panics
/// If the provider fails one; the message names it.
pub fn run(connect: &mut Connect) {
    for (name, case) in CASES {
        if let Err(what) = case(connect) {
            panic!("conformance: {name}: {what}");
        }
    }
}

type Outcome<T = ()> = Result<T, String>;
type ConformanceCase = fn(&mut Connect) -> Outcome;

const CASES: &[(&str, ConformanceCase)] = &[
    ("private data of every length arrives both ways", connections::private_data_arrives),
    ("a peer that is rejected hears why", connections::a_rejected_peer_hears_why),
    ("what the endpoints ask for is there", connections::endpoints_get_what_they_ask_for),
    ("messages of every length arrive whole and in order", messages::every_length_arrives),
    ("a message in pieces arrives in one", messages::pieces_arrive_in_one),
    ("a queue is as deep as its endpoint says", messages::a_queue_is_as_deep_as_it_says),
    ("what was sent is let go of when it comes back", messages::what_came_back_is_let_go_of),
    ("what was written is there before the next message", memory::writes_come_before_messages),
    ("reads of every length fetch every byte", memory::reads_fetch_every_byte),
    ("more reads than may be on their way wait their turn", memory::reads_wait_their_turn),
    ("what stands behind a read is done too", memory::work_behind_a_read_is_done),
    ("both sides read at once", memory::both_sides_read_at_once),
    ("memory may be granted before there is a connection", memory::grants_before_the_connection),
    ("a message closes the peer's memory", memory::a_message_closes_memory),
    ("as much memory may be open as the endpoint says", memory::registrations_are_bounded),
    ("a peer that uses what it was not granted is refused", refusals::ungranted_memory_is_refused),
    ("memory that was closed is refused whoever closed it", refusals::closed_memory_is_refused),
    ("what another connection was granted means nothing", refusals::foreign_names_are_refused),
    ("a name that is not open cannot be closed by a message", refusals::closing_what_is_closed),
    ("a message without a receive buffer ends the connection", refusals::no_receive_buffer),
    ("a message that is too long ends the connection", refusals::a_message_too_long),
    ("work that cannot be done fails", refusals::impossible_work_fails),
    ("who leaves has everything done before", connections::leaving_is_soft),
    ("a peer that leaves is noticed once", connections::leaving_is_noticed_once),
    ("a lost connection gives everything back once", connections::losses_give_everything_back),
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

        fn cut(&mut self) {
            self.0.cut_after(0);
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

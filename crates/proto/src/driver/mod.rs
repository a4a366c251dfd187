//! Between a session and its driver: the traits of [`session`] and [`target`], what a session sends
//! ([`outbox`], [`frames`]), what it reports ([`audit_event`]), what it learns of a connection
//! ([`transport`]), and work for other threads ([`computation`]).

pub mod audit_event;
pub(crate) mod backoff;
pub mod computation;
pub mod frames;
pub mod outbox;
pub mod session;
pub mod target;
pub mod transport;

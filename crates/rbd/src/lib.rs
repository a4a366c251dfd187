//! Images of Ceph RBD.
//!
//! | module | what it knows |
//! |---|---|
//! | [`library`] | librados and librbd, loaded at run time |
//! | [`cluster`] | connections to clusters, which images share |
//! | [`client`] | this process as a client, and how clients are fenced |
//! | [`pool`] | pools of a cluster |
//! | [`image`] | open images: what they are, their sizes and extents, and calls that block |
//! | [`lock`] | the exclusive lock of an image, by which one client owns it |
//! | [`object`] | small objects, replaced by compare-and-set |
//! | [`watch`] | notifications about an object |
//! | [`requests`] | one core's requests to an image, and how it learns that they have completed |
//! | [`error`] | what has failed, and what to do |
//! | `fake`, `fake_cluster` | an image, and a cluster with objects, in memory, for tests without a cluster |
//!
//! `docs/decisions/0114-ceph-rbd-by-librbd.md` has the reasons.

pub mod client;
pub mod cluster;
pub mod error;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
#[cfg(any(test, feature = "fake"))]
pub mod fake_cluster;
pub mod image;
pub mod library;
pub mod lock;
pub mod object;
pub mod pool;
pub mod requests;
pub mod watch;

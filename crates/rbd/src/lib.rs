//! Images of Ceph RBD.
//!
//! | module | what it knows |
//! |---|---|
//! | [`library`] | librados and librbd, loaded at run time |
//! | [`cluster`] | connections to clusters, which images share |
//! | [`image`] | open images: what they are, their sizes and extents, and calls that block |
//! | [`lock`] | the exclusive lock of an image, by which one client owns it |
//! | [`object`] | a small object beside an image, replaced by compare-and-set |
//! | [`requests`] | one core's requests to an image, and how it learns that they have completed |
//! | [`error`] | what has failed, and what to do |
//! | `fake` | an image in memory, for tests without a cluster |
//!
//! `docs/decisions/0114-ceph-rbd-by-librbd.md` has the reasons.

pub mod cluster;
pub mod error;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod image;
pub mod library;
pub mod lock;
pub mod object;
pub mod requests;

//! The lab: jobs, the load generator, and reports.
//!
//! ```text
//!   job ──▶ generator ──▶ result ──▶ table, fio JSON, page
//!     ╲───▶ ceiling   ──╱
//! ```
//!
//! A [`job::Job`] describes a load in fio's vocabulary; the generator applies it to any volume, and
//! the ceiling does so with bare sockets. [`result`] holds the results; the other modules format
//! them.

pub mod bonnie;
pub mod ceiling;
pub mod change;
pub mod content;
mod cpu;
pub mod figure;
pub mod fio_json;
pub mod generator;
pub mod grid;
pub mod histogram;
pub mod job;
mod job_error;
pub mod job_file;
pub mod link;
pub mod machine;
pub mod options;
pub mod page;
pub mod pattern;
pub mod result;
pub mod suite;
pub mod table;
pub mod units;
pub mod when;

//! The lab: what to measure, measuring it, and showing what came out.
//!
//! ```text
//!   job ──▶ generator ──▶ result ──▶ table, fio JSON, page
//!     ╲───▶ ceiling   ──╱
//! ```
//! A [`job::Job`] says what to do in fio's vocabulary; the generator does it to any volume and the
//! ceiling program does the same with bare sockets; [`result`] holds what they found, and the rest
//! shows it.

pub mod ceiling;
pub mod content;
mod cpu;
pub mod figure;
pub mod fio_json;
pub mod generator;
pub mod histogram;
pub mod job;
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

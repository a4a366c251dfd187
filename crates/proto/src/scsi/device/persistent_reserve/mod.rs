//! PERSISTENT RESERVE IN and OUT (SPC-5).

mod change;
mod report;

pub(super) use change::reserve_out;
pub(super) use report::reserve_in;

#[cfg(test)]
mod tests;

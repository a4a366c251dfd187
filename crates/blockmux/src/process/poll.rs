//! `--poll`: when an idle core goes to sleep.

use blockmux_engine::core::reactor::PollPolicy;
use serde::{Deserialize, Serialize};

/// Polling policy: poll for a short time after the last activity, always poll, or sleep at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Poll {
    Adaptive,
    Always,
    Never,
}

impl From<Poll> for PollPolicy {
    fn from(poll: Poll) -> PollPolicy {
        match poll {
            Poll::Adaptive => PollPolicy::ADAPTIVE,
            Poll::Always => PollPolicy::Always,
            Poll::Never => PollPolicy::Never,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn reports_name_a_policy_like_the_option() {
        for poll in Poll::value_variants() {
            let asked = poll.to_possible_value().unwrap();
            assert_eq!(asked.get_name(), PollPolicy::from(*poll).name());
        }
    }
}

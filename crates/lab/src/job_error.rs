//! Errors of jobs and their options.

/// Why a job is invalid: one line that says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// There is no such option, or it is not supported here.
    #[error("{0}")]
    Option(String),
    /// The option's value is invalid.
    #[error("bad value `{value}` for `{key}`: {why}")]
    BadValue {
        /// The option.
        key: &'static str,
        /// The value.
        value: String,
        /// Why it is invalid, to end the sentence.
        why: String,
    },
}

impl JobError {
    /// The error for a name that is in none of `lists`.
    pub(crate) fn unknown(key: &str, lists: &[&[&'static str]]) -> JobError {
        let known = lists.concat();
        let instead = match nearest(key, &known) {
            Some(name) => format!(", did you mean `{name}`?"),
            None => format!("; known are {}", known.join(" ")),
        };
        JobError::Option(format!("unknown fio option `{key}`{instead}"))
    }

    /// The error for an option that fio has.
    pub(crate) fn unsupported(key: &str, instead: &str) -> JobError {
        JobError::Option(format!("fio option `{key}` is not supported: {instead}"))
    }

    pub(crate) fn bad_value(key: &'static str, value: impl ToString, why: impl Into<String>) -> JobError {
        JobError::BadValue { key, value: value.to_string(), why: why.into() }
    }
}

/// The known name that is most similar to `key`: at most a third of its letters differ, in any
/// case.
#[must_use]
pub fn nearest<'a>(key: &str, known: &[&'a str]) -> Option<&'a str> {
    let distance = |name: &str| strsim::osa_distance(&key.to_ascii_lowercase(), &name.to_ascii_lowercase());
    let &best = known.iter().min_by_key(|name| distance(name))?;
    let close = distance(best) <= (best.len().max(key.len()) / 3).max(1);
    close.then_some(best)
}

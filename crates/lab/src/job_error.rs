//! Errors of jobs and their options.

/// Why a job is invalid: one line that says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// The option is unknown.
    #[error("unknown fio option `{key}`{}", in_place_of(*.nearest, .known))]
    Unknown {
        /// The name as given.
        key: String,
        /// The most similar known name, if there is one.
        nearest: Option<&'static str>,
        /// Every name known in that context.
        known: Vec<&'static str>,
    },
    /// fio has the option, but it is not supported here.
    #[error("fio option `{key}` is not supported: {instead}")]
    Unsupported {
        /// The option.
        key: &'static str,
        /// What to do.
        instead: &'static str,
    },
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
        JobError::Unknown { key: key.to_owned(), nearest: nearest(key, &known), known }
    }

    pub(crate) fn bad_value(key: &'static str, value: impl ToString, why: impl Into<String>) -> JobError {
        JobError::BadValue { key, value: value.to_string(), why: why.into() }
    }
}

fn in_place_of(nearest: Option<&str>, known: &[&str]) -> String {
    match nearest {
        Some(name) => format!(", did you mean `{name}`?"),
        None => format!("; known are {}", known.join(" ")),
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

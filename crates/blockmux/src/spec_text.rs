//! A volume spec or URL as a user wrote it.

use blockmux_volume::spec::with_hidden_secrets;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;
use utoipa::ToSchema;

/// A volume spec or URL as a user wrote it, with or without a name before it; it may be invalid. It
/// prints with hidden secrets.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
#[schema(value_type = String, example = "data=mem:64m")]
pub(crate) struct SpecText(String);

impl SpecText {
    /// The text with its secrets, to parse it. Never print it.
    pub(crate) fn as_written(&self) -> &str {
        &self.0
    }
}

impl FromStr for SpecText {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<SpecText, Infallible> {
        Ok(SpecText(text.to_owned()))
    }
}

impl fmt::Display for SpecText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&with_hidden_secrets(&self.0))
    }
}

impl fmt::Debug for SpecText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

//! The format of all errors of the API.

use crate::failure::Failure;
use crate::output::{masked, shortened};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// The body of a response that reports an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ErrorBody {
    pub(crate) error: ApiError,
}

/// An error of the API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ApiError {
    /// Kind of error, for programs; stable across versions.
    pub(crate) code: ErrorCode,
    /// The thing and what happened, for people.
    pub(crate) message: String,
    /// Advice for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) hint: Option<String>,
}

/// Kinds of errors; each has its HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ErrorCode {
    /// 400: the request is invalid HTTP or JSON.
    Malformed,
    /// 401: the token is missing or wrong.
    Unauthorized,
    /// 403: the client's certificate or role does not permit the request.
    Forbidden,
    /// 404: there is no such path, volume, target, unit or action.
    NotFound,
    /// 405: the path does not support the method.
    MethodNotAllowed,
    /// 408: the request took too long to arrive.
    Timeout,
    /// 409: the current state of the daemon does not allow it.
    Conflict,
    /// 412: the object has another tag than `If-Match` says, or exists although it must be new.
    PreconditionFailed,
    /// 413: the request is too long.
    TooLarge,
    /// 415: the body is not JSON.
    UnsupportedMediaType,
    /// 422: a value is invalid.
    Invalid,
    /// 500: the request was started and failed.
    Failed,
    /// 503: too many requests at a time, or a reload or save is under way that takes long.
    Busy,
    /// 503: the daemon starts or stops, or one of its cores does not answer.
    Unavailable,
}

impl ErrorCode {
    /// The HTTP status.
    pub(crate) fn status(self) -> u16 {
        match self {
            ErrorCode::Malformed => 400,
            ErrorCode::Unauthorized => 401,
            ErrorCode::Forbidden => 403,
            ErrorCode::NotFound => 404,
            ErrorCode::MethodNotAllowed => 405,
            ErrorCode::Timeout => 408,
            ErrorCode::Conflict => 409,
            ErrorCode::PreconditionFailed => 412,
            ErrorCode::TooLarge => 413,
            ErrorCode::UnsupportedMediaType => 415,
            ErrorCode::Invalid => 422,
            ErrorCode::Failed => 500,
            ErrorCode::Busy | ErrorCode::Unavailable => 503,
        }
    }
}

impl ApiError {
    /// An error from a message for people; the text after its first semicolon becomes the hint.
    pub(crate) fn new(code: ErrorCode, text: impl ToString) -> ApiError {
        // It may quote a name or another text of the client, which may be long.
        let text = masked(&text.to_string());
        let text = shortened(&text);
        match text.split_once("; ") {
            Some((message, hint)) => {
                ApiError { code, message: message.to_owned(), hint: Some(hint.to_owned()) }
            }
            None => ApiError { code, message: text.into_owned(), hint: None },
        }
    }

    /// An error about a thing that does not exist.
    pub(crate) fn not_found(text: impl ToString) -> ApiError {
        ApiError::new(ErrorCode::NotFound, text)
    }

    /// An error about an invalid value.
    pub(crate) fn invalid(text: impl ToString) -> ApiError {
        ApiError::new(ErrorCode::Invalid, text)
    }

    /// An error of a request that was started.
    pub(crate) fn failed(text: impl ToString) -> ApiError {
        ApiError::new(ErrorCode::Failed, text)
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.hint.iter().try_for_each(|hint| write!(f, "; {hint}"))
    }
}

/// Messages without a code are conflicts: most refusals depend on the state of the daemon.
impl From<String> for ApiError {
    fn from(text: String) -> ApiError {
        ApiError::new(ErrorCode::Conflict, text)
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> ApiError {
        match failure {
            Failure::Request(text) => ApiError::invalid(text),
            Failure::Run(text) | Failure::Refused { text, .. } => ApiError::failed(text),
        }
    }
}

/// The error of a client's command.
impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Failure {
        let code = serde_json::to_value(error.code).ok();
        let code = code.as_ref().and_then(serde_json::Value::as_str).unwrap_or("failed").to_owned();
        Failure::Refused { code, text: error.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_split_into_what_happened_and_what_to_do() {
        let text = "a: it can have at most 5 bytes; serve a larger one; or none";
        let error = ApiError::invalid(text);
        assert_eq!(error.to_string(), text);
        let json = serde_json::to_string(&ErrorBody { error }).unwrap();
        assert_eq!(
            json,
            "{\"error\":{\"code\":\"invalid\",\"message\":\"a: it can have at most 5 bytes\",\
             \"hint\":\"serve a larger one; or none\"}}"
        );
        assert_eq!(ApiError::not_found("nothing").hint, None);
    }

    #[test]
    fn a_long_text_of_the_client_is_not_repeated_whole() {
        let error = ApiError::invalid(format!("`{}` is no volume; choose another", "x".repeat(4 << 20)));
        assert!(error.to_string().len() < 2000 && error.hint.as_deref() == Some("choose another"));
    }
}

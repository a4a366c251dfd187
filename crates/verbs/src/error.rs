//! Errors of rdma-core: the call that failed, and why.

use crate::library::LibraryError;
use std::ffi::c_int;
use std::io;

/// A call of rdma-core has failed, or cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// rdma-core is not there.
    #[error("{0}")]
    Library(#[from] LibraryError),
    /// A call has failed.
    #[error("{call}: {error}")]
    Call {
        /// The function.
        call: &'static str,
        /// The error number that it returned or set.
        error: io::Error,
    },
    /// The device is gone.
    #[error("the RDMA device was removed")]
    Removed,
    /// The device cannot do what is needed.
    #[error("{0}")]
    Unsupported(&'static str),
}

impl VerbsError {
    /// A call that has set `errno`.
    pub(crate) fn last(call: &'static str) -> VerbsError {
        VerbsError::Call { call, error: io::Error::last_os_error() }
    }

    /// The result of a call that returns an error number, possibly negative.
    pub(crate) fn check_number(call: &'static str, number: c_int) -> Result<(), VerbsError> {
        match number {
            0 => Ok(()),
            number => Err(VerbsError::Call { call, error: io::Error::from_raw_os_error(number.abs()) }),
        }
    }

    /// The result of a call that returns -1 and sets `errno`.
    pub(crate) fn check_errno(call: &'static str, result: c_int) -> Result<(), VerbsError> {
        if result == 0 { Ok(()) } else { Err(VerbsError::last(call)) }
    }
}

impl From<VerbsError> for io::Error {
    fn from(error: VerbsError) -> io::Error {
        let kind = match &error {
            VerbsError::Call { error, .. } => error.kind(),
            VerbsError::Library(_) => io::ErrorKind::NotFound,
            VerbsError::Removed => io::ErrorKind::ConnectionReset,
            VerbsError::Unsupported(_) => io::ErrorKind::Unsupported,
        };
        io::Error::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_call_and_keeps_its_kind() {
        let error = VerbsError::check_number("ibv_post_send", libc::ENOMEM).unwrap_err();
        assert_eq!(error.to_string(), "ibv_post_send: Cannot allocate memory (os error 12)");
        assert_eq!(io::Error::from(error).kind(), io::ErrorKind::OutOfMemory);
        let negative = VerbsError::check_number("rdma_connect", -libc::ECONNREFUSED).unwrap_err();
        assert_eq!(io::Error::from(negative).kind(), io::ErrorKind::ConnectionRefused);
        assert!(VerbsError::check_number("ibv_post_recv", 0).is_ok());
    }
}

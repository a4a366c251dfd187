//! The state of a session that another process continues between two of its requests.
//!
//! Most NBD clients do not reconnect when their connection ends. So a process that takes over from
//! another one receives the client's socket together with this state, and the client notices only a
//! pause.

use super::params::ServerParams;
use crate::exports::Exports;
use crate::nbd::HeaderFormat;
use blockmux_wire::nbd::handshake::{InfoBlockSize, InfoExport};
use zerocopy::IntoBytes;

/// Why a session cannot be continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NbdResumeError {
    /// The state was written by another version of the program, or is damaged.
    #[error("its state was written by another version")]
    Unknown,
    /// There is no such export, or the client's listener does not serve it.
    #[error("its export is not served here")]
    NoExport,
    /// The export's properties differ from those advertised to the client when it connected.
    #[error("its export has another size, or other properties")]
    Changed,
    /// What the client has sent may be out of date.
    #[error("another server has served its export since")]
    Fenced,
}

/// Writes the state of a session:
/// ```text
/// version u8 | headers u8 | agreed u8 | NBD_INFO_EXPORT | NBD_INFO_BLOCK_SIZE | export's name
/// ```
/// `agreed` has a bit for `base:allocation`, one for a client that respects the block sizes, and
/// one for a session that its volume has fenced.
pub(super) fn encode(params: &ServerParams, export: &str, is_fenced: bool) -> Vec<u8> {
    let headers = match params.headers {
        HeaderFormat::Simple => 0,
        HeaderFormat::Structured => 1,
        HeaderFormat::Extended => 2,
    };
    let respects_sizes = if params.respects_sizes { RESPECTS_SIZES } else { 0 };
    let fenced = if is_fenced { FENCED } else { 0 };
    let head = [VERSION, headers, u8::from(params.base_allocation) | respects_sizes | fenced];
    [&head[..], &advertised(params), export.as_bytes()].concat()
}

/// Parses the state that [`encode`] wrote, and checks that the export's advertised properties have
/// not changed.
///
/// # Errors
/// If the session cannot be continued with these exports.
pub(super) fn decode(state: &[u8], exports: &Exports) -> Result<(ServerParams, String), NbdResumeError> {
    let (&[version, headers, agreed], rest) = state.split_first_chunk().ok_or(NbdResumeError::Unknown)?;
    let headers = match headers {
        0 => HeaderFormat::Simple,
        1 => HeaderFormat::Structured,
        2 => HeaderFormat::Extended,
        _ => return Err(NbdResumeError::Unknown),
    };
    if version != VERSION {
        return Err(NbdResumeError::Unknown);
    }
    let (earlier, name) = rest.split_at_checked(ADVERTISED_LEN).ok_or(NbdResumeError::Unknown)?;
    let name = str::from_utf8(name).map_err(|_| NbdResumeError::Unknown)?;
    let (volume, export) = exports.find(name).ok_or(NbdResumeError::NoExport)?;
    let (base_allocation, respects_sizes) = (agreed & BASE_ALLOCATION != 0, agreed & RESPECTS_SIZES != 0);
    let params = ServerParams::new(volume, &export, headers, base_allocation, respects_sizes);
    if advertised(&params) != earlier {
        return Err(NbdResumeError::Changed);
    }
    if agreed & FENCED != 0 {
        return Err(NbdResumeError::Fenced);
    }
    Ok((params, name.to_owned()))
}

/// The export's properties as advertised to a client.
fn advertised(params: &ServerParams) -> Vec<u8> {
    [params.info_export().as_bytes(), params.info_block_size().as_bytes()].concat()
}

const VERSION: u8 = 2;
const BASE_ALLOCATION: u8 = 1;
const RESPECTS_SIZES: u8 = 2;
const FENCED: u8 = 4;
/// Length of [`advertised`], in bytes.
const ADVERTISED_LEN: usize = size_of::<InfoExport>() + size_of::<InfoBlockSize>();

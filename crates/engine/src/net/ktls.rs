//! Kernel TLS (kTLS, `Documentation/networking/tls.rst`): setting record keys on a TCP socket.
//!
//! The kernel auto-loads its module `tls` only for a process with CAP_NET_ADMIN, which the daemon
//! drops: [`load`] is called before that. Where the kernel lacks TLS, it is not tried again for a
//! minute, because each attempt may search for the module.

use crate::sys::set_option;
use blockmux_tls::RecordKeys;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Direction of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the peer.
    Sending,
    /// From the peer.
    Receiving,
}

/// Makes the kernel load its TLS module, if possible. Attaching to an unconnected socket fails, but
/// only after the module was loaded.
pub fn load() {
    if let Ok(socket) = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None) {
        let _ = set_option(socket.as_raw_fd(), libc::SOL_TCP, libc::TCP_ULP, b"tls");
    }
}

/// Attaches kTLS to a connected socket, which changes nothing until keys are set.
///
/// # Errors
/// If the kernel lacks TLS, or the socket is not a TCP socket.
pub(crate) fn attach(fd: RawFd) -> io::Result<()> {
    let suspended = *SUSPENDED_SINCE.lock().unwrap_or_else(PoisonError::into_inner);
    if suspended.is_some_and(|since| since.elapsed() < RETRY_AFTER) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let attached = set_option(fd, libc::SOL_TCP, libc::TCP_ULP, b"tls");
    // ENOENT: no such module; ENOPROTOOPT: kernel before 4.13.
    if let Err(error) = &attached
        && matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOPROTOOPT))
    {
        suspend();
    }
    attached
}

/// Stops the use of kTLS on new connections for [`RETRY_AFTER`].
pub(crate) fn suspend() {
    *SUSPENDED_SINCE.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
}

/// Sets the keys of one direction.
///
/// # Errors
/// If the kernel rejects them. Before 6.14 it accepts only the first keys.
pub(crate) fn set_keys(fd: RawFd, direction: Direction, keys: &RecordKeys) -> io::Result<()> {
    let option = match direction {
        Direction::Sending => libc::TLS_TX,
        Direction::Receiving => libc::TLS_RX,
    };
    set_option(fd, libc::SOL_TLS, option, &crypto_info(keys))?;
    if direction == Direction::Receiving {
        // Records without padding, which are the rule, can then be decrypted in place. Others are
        // decrypted twice; kernels before 6.0 do that with all records.
        let _ = set_option(fd, libc::SOL_TLS, TLS_RX_EXPECT_NO_PAD, &1u32.to_ne_bytes());
    }
    Ok(())
}

/// `struct tls12_crypto_info_aes_gcm_128` or `_256`, which have no padding: version, cipher, the IV
/// without its first four bytes, the key, those four bytes (salt), the next record's sequence
/// number.
fn crypto_info(keys: &RecordKeys) -> Vec<u8> {
    let cipher =
        if keys.key.len() == 16 { libc::TLS_CIPHER_AES_GCM_128 } else { libc::TLS_CIPHER_AES_GCM_256 };
    let (salt, iv) = keys.iv.split_at(4);
    let mut info = Vec::with_capacity(56);
    info.extend(libc::TLS_1_3_VERSION.to_ne_bytes());
    info.extend(cipher.to_ne_bytes());
    info.extend([iv, &keys.key, salt, &keys.sequence.to_be_bytes()].concat());
    info
}

/// When the kernel was found to lack TLS. Only new connections read it, so a lock is cheap enough.
static SUSPENDED_SINCE: Mutex<Option<Instant>> = Mutex::new(None);
/// How long kTLS is not tried after it was found to be missing.
const RETRY_AFTER: Duration = Duration::from_secs(60);
/// `linux/tls.h`, since Linux 6.0.
const TLS_RX_EXPECT_NO_PAD: libc::c_int = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_kernels_layout() {
        let iv = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        let info =
            |key_len| crypto_info(&RecordKeys { key: vec![0xaa; key_len].into(), iv, sequence: 0x0102 });
        let (short, long) = (info(16), info(32));
        assert_eq!(short.len(), size_of::<libc::tls12_crypto_info_aes_gcm_128>());
        assert_eq!(long.len(), size_of::<libc::tls12_crypto_info_aes_gcm_256>());
        assert_eq!(short[..4], [4, 3, 51, 0].map(|byte: u8| byte));
        assert_eq!(long[2..4], 52u16.to_ne_bytes());
        for (info, key_len) in [(short, 16), (long, 32)] {
            assert_eq!(info[4..12], iv[4..]);
            assert_eq!(info[12..][..key_len], vec![0xaa; key_len]);
            assert_eq!(info[12 + key_len..][..4], iv[..4]);
            assert_eq!(info[16 + key_len..], [0, 0, 0, 0, 0, 0, 1, 2]);
        }
    }
}

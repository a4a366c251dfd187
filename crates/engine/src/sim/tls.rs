//! Simulated kTLS with real records: one end can be the kernel's and the other the library's.

use crate::net::ktls::Direction;
use blockmux_tls::{APPLICATION_DATA, HEADER_LEN, MAX_PLAINTEXT, OVERHEAD, RecordKeys, Records};
use std::collections::VecDeque;
use std::io;

/// TLS support of a simulated kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SystemTls {
    /// No kTLS.
    #[default]
    None,
    /// kTLS can be attached, but no keys are accepted.
    NoKeys,
    /// Only the key for sending is accepted.
    Half,
    /// Keys are accepted once, as by Linux before 6.14.
    Once,
    /// Later keys are accepted, too.
    Rekeys,
}

/// Kernel TLS of one end of a connection.
pub(super) struct SimTls {
    system: SystemTls,
    sending: Option<Records>,
    receiving: Option<Records>,
    /// Records received in part.
    raw: Vec<u8>,
    /// Decrypted records: content types and bytes, not empty.
    opened: VecDeque<(u8, VecDeque<u8>)>,
    /// A record could not be decrypted.
    has_failed: bool,
}

impl SimTls {
    /// Attaches kTLS to a stream.
    ///
    /// # Errors
    /// If the simulated kernel has no kTLS.
    pub(super) fn attach(system: SystemTls) -> io::Result<SimTls> {
        if system == SystemTls::None {
            return Err(io::ErrorKind::NotFound.into());
        }
        let (raw, opened) = (Vec::new(), VecDeque::new());
        Ok(SimTls { system, sending: None, receiving: None, raw, opened, has_failed: false })
    }

    /// Sets the keys of one direction.
    ///
    /// # Errors
    /// If the simulated kernel rejects them: see [`SystemTls`].
    pub(super) fn set_keys(&mut self, direction: Direction, keys: &RecordKeys) -> io::Result<()> {
        let records = match direction {
            Direction::Sending => &mut self.sending,
            Direction::Receiving => &mut self.receiving,
        };
        let is_taken = match self.system {
            SystemTls::None | SystemTls::NoKeys => false,
            SystemTls::Half => direction == Direction::Sending && records.is_none(),
            SystemTls::Once => records.is_none(),
            SystemTls::Rekeys => true,
        };
        if !is_taken {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        *records = Some(Records::new(keys));
        Ok(())
    }

    pub(super) fn sends(&self) -> bool {
        self.sending.is_some()
    }

    pub(super) fn receives(&self) -> bool {
        self.receiving.is_some()
    }

    /// How many of `len` bytes fit in one record of at most `room` bytes.
    pub(super) fn fits(len: usize, room: usize) -> usize {
        len.min(MAX_PLAINTEXT).min(room.saturating_sub(OVERHEAD))
    }

    pub(super) fn seal(&mut self, content_type: u8, plain: &[u8]) -> VecDeque<u8> {
        let record = self.sending.as_mut().map(|records| records.seal(content_type, plain));
        record.unwrap_or_default().into()
    }

    /// Takes received bytes. Records are decrypted only when they are read, because keys may change
    /// until then.
    pub(super) fn take(&mut self, bytes: &[u8]) {
        self.raw.extend_from_slice(bytes);
    }

    /// Whether something can be read without more bytes.
    pub(super) fn has_more(&self) -> bool {
        !self.opened.is_empty() || self.next_record().is_some() || self.has_failed
    }

    /// Length of the next record, if it is complete.
    fn next_record(&self) -> Option<usize> {
        let header = self.raw.get(..HEADER_LEN)?;
        let len = HEADER_LEN + usize::from(u16::from_be_bytes([header[3], header[4]]));
        (self.raw.len() >= len).then_some(len)
    }

    /// Passes up to `most` bytes of data to `put`; returns their number, or `None` if there is
    /// nothing.
    pub(super) fn data(&mut self, most: usize, mut put: impl FnMut(&[u8])) -> io::Result<Option<usize>> {
        let mut passed = 0;
        while passed < most {
            self.open()?;
            match self.opened.front_mut() {
                Some((APPLICATION_DATA, bytes)) => {
                    let part_len = bytes.len().min(most - passed);
                    put(&bytes.drain(..part_len).collect::<Vec<u8>>());
                    passed += part_len;
                    if bytes.is_empty() {
                        self.opened.pop_front();
                    }
                }
                Some(_) if passed == 0 => return Err(io::Error::from_raw_os_error(libc::EIO)),
                _ => break,
            }
        }
        Ok((passed > 0).then_some(passed))
    }

    /// Reads the next record of any type.
    pub(super) fn record(&mut self, room: &mut [u8]) -> io::Result<Option<(u8, usize)>> {
        self.open()?;
        let Some((content_type, mut bytes)) = self.opened.pop_front() else { return Ok(None) };
        let len = bytes.len().min(room.len());
        for (to, from) in room.iter_mut().zip(bytes.drain(..len)) {
            *to = from;
        }
        if !bytes.is_empty() {
            self.opened.push_front((content_type, bytes));
        }
        Ok(Some((content_type, len)))
    }

    /// Decrypts the next non-empty record, unless one is decrypted.
    fn open(&mut self) -> io::Result<()> {
        while self.opened.is_empty()
            && let Some(len) = self.next_record()
        {
            let record: Vec<u8> = self.raw.drain(..len).collect();
            let Some((content_type, bytes)) = self.receiving.as_mut().and_then(|key| key.open(&record))
            else {
                self.has_failed = true;
                break;
            };
            if !bytes.is_empty() {
                self.opened.push_back((content_type, bytes.into()));
            }
        }
        if self.has_failed { Err(io::Error::from_raw_os_error(libc::EBADMSG)) } else { Ok(()) }
    }
}

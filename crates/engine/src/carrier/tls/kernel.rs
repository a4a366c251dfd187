//! kTLS: passing keys to the kernel, and handling what the kernel leaves to us.
//!
//! The kernel encrypts and decrypts data. It passes up records of other types: session tickets,
//! which are ignored, alerts and KeyUpdate. After a KeyUpdate the kernel needs the next keys, which
//! Linux accepts since 6.14; before that the connection ends, and the initiator reconnects.
//!
//! A key may protect only a limited amount of data (RFC 8446 §5.5), which the kernel does not
//! count.

use crate::carrier::broken::Broken;
use crate::net::host::ByteStream;
use crate::net::ktls::Direction;
use blockmux_tls::{
    ALERT, APPLICATION_DATA, ExportedKeys, HANDSHAKE, MAX_PLAINTEXT, OUR_CLOSE_NOTIFY, OUR_KEY_UPDATE,
    PostHandshakeAction, PostHandshakeMessages, Tls, TlsError, TrafficSecret,
};
use std::io;

/// State of a connection whose records the kernel processes.
pub(super) struct KernelTls {
    is_client: bool,
    sending: TrafficSecret,
    receiving: TrafficSecret,
    messages: PostHandshakeMessages,
    /// Upper bound of the cipher blocks encrypted with the sending key.
    blocks: u64,
    /// A KeyUpdate must be sent before more data.
    owes_update: bool,
    /// close_notify or an alert was sent: nothing more is sent.
    is_closed: bool,
}

/// Result of passing the keys to the kernel.
pub(super) enum HandedOver {
    /// The library is not at a record boundary.
    NotYet,
    /// The kernel refused; the library continues.
    Refused(io::Error),
    /// The kernel processes the records.
    Done(Box<KernelTls>),
}

/// Passes the keys to the kernel, whose TLS is attached to the socket.
pub(super) fn hand_over<S: ByteStream>(tls: &mut Tls, stream: &mut S) -> Result<HandedOver, Broken> {
    let Some(exported) = tls.export() else { return Ok(HandedOver::NotYet) };
    let keys = exported.sending.keys(exported.next_sent);
    if let Err(error) = stream.set_tls_keys(Direction::Sending, &keys) {
        tls.resume(&exported)?;
        return Ok(HandedOver::Refused(error));
    }
    let keys = exported.receiving.keys(exported.next_received);
    if stream.set_tls_keys(Direction::Receiving, &keys).is_err() {
        // This socket cannot go back to the library, but later connections use the library.
        stream.suspend_tls();
        return Err(Broken::Keys("the kernel accepted the TLS key of one direction only"));
    }
    Ok(HandedOver::Done(Box::new(KernelTls::new(exported, tls.is_client()))))
}

impl KernelTls {
    fn new(exported: ExportedKeys, is_client: bool) -> KernelTls {
        KernelTls {
            is_client,
            blocks: exported.next_sent.saturating_mul(MAX_BLOCKS_OF_RECORD),
            sending: exported.sending,
            receiving: exported.receiving,
            messages: PostHandshakeMessages::default(),
            owes_update: false,
            is_closed: false,
        }
    }

    /// Counts bytes of data sent.
    #[inline]
    pub(super) fn on_sent(&mut self, bytes: usize) {
        let bytes = bytes as u64;
        // The kernel uses as few records for a call as possible.
        let records = bytes / MAX_PLAINTEXT as u64 + 1;
        self.blocks += bytes / BLOCK + 1 + records * OVERHEAD_BLOCKS;
        self.owes_update |= self.blocks >= MAX_BLOCKS;
    }

    /// Sends a KeyUpdate if one must precede more data.
    #[inline]
    pub(super) fn before_sending<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), Broken> {
        if self.owes_update || self.is_closed { self.update_sending(stream) } else { Ok(()) }
    }

    #[cold]
    fn update_sending<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), Broken> {
        if self.is_closed {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
        }
        stream.send_record(HANDSHAKE, &OUR_KEY_UPDATE)?;
        (self.owes_update, self.blocks) = (false, 0);
        self.sending.update();
        stream.set_tls_keys(Direction::Sending, &self.sending.keys(0)).map_err(|_| {
            // The peer expects the next key, which the kernel does not accept, and the old key must
            // not be used.
            self.is_closed = true;
            Broken::Keys(
                "the TLS key has reached its limit, and the kernel accepts no other (Linux 6.14 does)",
            )
        })
    }

    /// Handles a failed receive; returns whether the peer has ended its output.
    pub(super) fn on_receive_error<S: ByteStream>(
        &mut self,
        stream: &mut S,
        error: io::Error,
    ) -> Result<bool, Broken> {
        let action = match error.raw_os_error() {
            Some(libc::EIO) => self.receive_record(stream),
            Some(libc::EBADMSG) => Err(TlsError::Unprotected.into()),
            Some(libc::EMSGSIZE) => Err(TlsError::TooLong.into()),
            // A record of another TLS version.
            Some(libc::EINVAL) => Err(TlsError::Unexpected.into()),
            _ => Err(error.into()),
        };
        match action {
            Ok(PostHandshakeAction::Nothing) => Ok(false),
            Ok(PostHandshakeAction::Ended) => Ok(true),
            Ok(PostHandshakeAction::KeyUpdate { is_requested }) => {
                self.update_receiving(stream)?;
                self.owes_update |= is_requested;
                // Our KeyUpdate must precede further data, and the peer may wait for it even if
                // there is no data.
                match self.before_sending(stream) {
                    Err(Broken::Socket(error)) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
                    result => result.map(|()| false),
                }
            }
            Err(broken) => {
                self.send_alert(stream, &broken);
                Err(broken)
            }
        }
    }

    /// Receives the next record, which is not data.
    fn receive_record<S: ByteStream>(&mut self, stream: &mut S) -> Result<PostHandshakeAction, Broken> {
        let mut bytes = vec![0; MAX_PLAINTEXT];
        match stream.receive_record(&mut bytes) {
            Ok((_, 0)) => Ok(PostHandshakeAction::Nothing),
            Ok((APPLICATION_DATA, _)) => Err(io::Error::from(io::ErrorKind::InvalidData).into()),
            Ok((content_type, len)) => Ok(self.messages.take(content_type, &bytes[..len], self.is_client)?),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(PostHandshakeAction::Nothing)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn update_receiving<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), Broken> {
        self.receiving.update();
        stream.set_tls_keys(Direction::Receiving, &self.receiving.keys(0)).map_err(|_| {
            Broken::Keys(
                "the peer has updated its TLS key, and the kernel accepts no other (Linux 6.14 does)",
            )
        })
    }

    /// Sends an alert if the peer has violated TLS.
    fn send_alert<S: ByteStream>(&mut self, stream: &mut S, broken: &Broken) {
        let Broken::Tls(error) = broken else { return };
        // After close_notify nothing more is sent (RFC 8446 §6.2).
        if let Some(alert) = error.alert()
            && !self.is_closed
        {
            let _ = stream.send_record(ALERT, &alert);
        }
        self.is_closed = true;
    }

    /// Sends close_notify.
    pub(super) fn close<S: ByteStream>(&mut self, stream: &mut S) {
        if !std::mem::replace(&mut self.is_closed, true) {
            let _ = stream.send_record(ALERT, &OUR_CLOSE_NOTIFY);
        }
    }
}

/// Block size of the cipher, in bytes.
const BLOCK: u64 = 16;
/// Blocks of each record beyond its data: content type and authentication tag.
const OVERHEAD_BLOCKS: u64 = 2;
const MAX_BLOCKS_OF_RECORD: u64 = MAX_PLAINTEXT as u64 / BLOCK + OVERHEAD_BLOCKS;
/// Limit of an AES-GCM key: 2^24.5 records of maximum length (RFC 8446 §5.5). It is counted in
/// blocks, so that more short records are permitted.
const MAX_BLOCKS: u64 = 23_726_566 * (MAX_PLAINTEXT as u64 / BLOCK);

#[cfg(test)]
impl super::Secure {
    /// Simulates that the key has reached its limit.
    pub(crate) fn reach_key_limit(&mut self) {
        if let super::TlsStage::Kernel(kernel) = &mut self.stage {
            kernel.blocks = MAX_BLOCKS;
        }
    }

    /// Updates our key and requests the peer to update its own.
    pub(crate) fn ask_for_update<S: ByteStream>(&mut self, stream: &mut S) {
        let super::TlsStage::Kernel(kernel) = &mut self.stage else { return };
        stream.send_record(HANDSHAKE, &[OUR_KEY_UPDATE[0], 0, 0, 1, 1]).expect("there is room");
        kernel.sending.update();
        stream
            .set_tls_keys(Direction::Sending, &kernel.sending.keys(0))
            .expect("the kernel accepts later keys");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_tls::{ClientCredentials, ServerCredentials};

    #[test]
    fn a_key_protects_as_many_records_of_maximum_length_as_the_specification_permits() {
        let most = 2f64.powf(24.5);
        assert!((most - 1.0..most).contains(&((MAX_BLOCKS / 1024) as f64)));
        // The bound is never below the true number: for records of 16 KiB, and for the shortest
        // ones.
        for (bytes, records) in [(MAX_PLAINTEXT, 1), (64 << 10, 4), (1, 1), (0, 1), (24, 1)] {
            let mut kernel = KernelTls::new(exported(), true);
            kernel.on_sent(bytes);
            let least = (bytes as u64 + records).div_ceil(BLOCK) + records;
            assert!(kernel.blocks >= least && kernel.blocks <= least + 2 * OVERHEAD_BLOCKS + 2, "{bytes}");
        }
    }

    /// Keys of a handshake between two local ends.
    fn exported() -> ExportedKeys {
        let key = blockmux_tls::Psk {
            identity: b"key".to_vec(),
            secret: vec![7; 32].into(),
            hash: blockmux_tls::Hash::Sha256,
        };
        let mut client = Tls::client(&ClientCredentials::Psks([key.clone()].into())).unwrap();
        let mut server =
            Tls::server(&ServerCredentials::Psks(std::sync::Arc::new(move |_: &[u8]| Some(key.clone()))))
                .unwrap();
        while !(client.is_open() && server.is_open()) {
            let output = std::mem::take(server.output());
            client.receive(&output, &mut []).unwrap();
            let output = std::mem::take(client.output());
            server.receive(&output, &mut []).unwrap();
        }
        client.export().unwrap()
    }
}

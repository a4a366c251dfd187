//! TLS of the API's blocking client.

use blockmux_engine::carrier::tls::{ClientCertificates, ClientCredentials, Tls, TlsError};
use std::io::{self, Read, Write};
use std::net::TcpStream;

/// A connection to a daemon whose API has TLS.
pub(super) struct TlsConnection {
    socket: TcpStream,
    tls: Tls,
    /// Received records that are not decrypted yet.
    incoming: Vec<u8>,
}

impl TlsConnection {
    /// Completes the TLS handshake on a connection.
    ///
    /// # Errors
    /// The errors of the socket, and any [`TlsError`]; [`TlsError::NotTls`] if the daemon answers
    /// without TLS.
    pub(super) fn open(socket: TcpStream, certificates: &ClientCertificates) -> io::Result<TlsConnection> {
        let credentials = ClientCredentials::Certificates(certificates.clone());
        let tls = Tls::client(&credentials).map_err(io::Error::other)?;
        let mut connection = TlsConnection { socket, tls, incoming: Vec::new() };
        connection.decrypt(&mut [])?;
        let mut is_first = true;
        while !connection.tls.is_open() {
            connection.receive()?;
            // The library would wait for the rest of a long record.
            if std::mem::take(&mut is_first) && connection.incoming.starts_with(HTTP) {
                return Err(io::Error::other(TlsError::NotTls));
            }
            connection.decrypt(&mut [])?;
        }
        Ok(connection)
    }

    /// Receives at least one byte of the daemon.
    fn receive(&mut self) -> io::Result<()> {
        let mut chunk = [0; CHUNK];
        match self.socket.read(&mut chunk)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            len => {
                self.incoming.extend_from_slice(&chunk[..len]);
                Ok(())
            }
        }
    }

    /// Decrypts what was received into `plain`, and sends what the handshake or an alert requires.
    fn decrypt(&mut self, plain: &mut [u8]) -> io::Result<usize> {
        let received = self.tls.receive(&self.incoming, plain);
        let sent = self.flush();
        let received = received.map_err(io::Error::other)?;
        self.incoming.drain(..received.taken);
        sent.map(|()| received.given)
    }
}

impl Read for TlsConnection {
    fn read(&mut self, plain: &mut [u8]) -> io::Result<usize> {
        loop {
            let given = self.decrypt(plain)?;
            if given > 0 || plain.is_empty() || self.tls.has_ended() {
                return Ok(given);
            }
            self.receive()?;
        }
    }
}

impl Write for TlsConnection {
    fn write(&mut self, plain: &[u8]) -> io::Result<usize> {
        self.tls.send(plain).map_err(io::Error::other)?;
        self.flush().map(|()| plain.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let output = std::mem::take(self.tls.output());
        self.socket.write_all(&output)
    }
}

/// The TLS error in an error of a connection, if it is one.
pub(crate) fn tls_error(error: &io::Error) -> Option<&TlsError> {
    error.get_ref()?.downcast_ref()
}

/// The beginning of an answer without TLS.
const HTTP: &[u8] = b"HTTP";
/// Number of bytes that are received at a time.
const CHUNK: usize = 16 << 10;

//! TLS of the API's server, for its asynchronous runtime.

use blockmux_engine::carrier::tls::{ServerCertificates, ServerCredentials, Tls, TlsError, TlsPeer};
use blockmux_engine::core::helpers;
use blockmux_proto::driver::computation::{Computation, Helpers, RunJob};
use rustix::fd::{AsFd, BorrowedFd};
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// A connection of an API client with TLS.
pub(super) struct TlsStream {
    socket: TcpStream,
    tls: Tls,
    /// Received records that are not decrypted yet.
    incoming: Vec<u8>,
    /// Number of bytes of the library's output that are sent.
    sent: usize,
}

impl TlsStream {
    /// Completes the TLS handshake on a connection. The caller bounds its time.
    ///
    /// # Errors
    /// The errors of the socket, and any `TlsError`.
    pub(super) async fn accept(
        socket: TcpStream,
        certificates: &ServerCertificates,
    ) -> io::Result<TlsStream> {
        let credentials = ServerCredentials::Certificates(certificates.clone());
        let tls = Tls::server(&credentials).map_err(io::Error::other)?;
        let mut stream = TlsStream { socket, tls, incoming: Vec::new(), sent: 0 };
        let run = helpers::for_peer(stream.socket.peer_addr().ok().map(|peer| peer.ip()));
        let mut is_first = true;
        while !stream.tls.is_open() {
            if poll_fn(|context| stream.poll_receive(context)).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // The library would wait for the rest of a long record.
            if std::mem::take(&mut is_first) && stream.incoming.first() != Some(&HANDSHAKE) {
                return Err(io::Error::other(TlsError::NotTls));
            }
            let decrypted;
            (stream, decrypted) = stream.shake_hands(run.clone()).await?;
            // If it failed, this is the alert.
            let sent = poll_fn(|context| stream.poll_send(context)).await;
            decrypted?;
            sent?;
        }
        Ok(stream)
    }

    /// Processes received records of the handshake on a helper thread: the API must take no CPU
    /// time from I/O for clients that have proved nothing.
    async fn shake_hands(self, run: RunJob) -> io::Result<(TlsStream, io::Result<()>)> {
        let TlsStream { socket, mut tls, mut incoming, sent } = self;
        let done = Arc::new(Notify::new());
        let notified = done.clone();
        let helpers = Helpers { run, notify: Arc::new(move || notified.notify_one()) };
        let mut step = Computation::start(Some(&helpers), move || {
            let received = tls.receive(&incoming, &mut []);
            incoming.drain(..received.as_ref().map_or(0, |received| received.taken));
            (tls, incoming, received)
        });
        done.notified().await;
        let (tls, incoming, received) = step.take().ok_or(io::ErrorKind::Interrupted)?;
        Ok((TlsStream { socket, tls, incoming, sent }, received.map(|_| ()).map_err(io::Error::other)))
    }

    /// How the client authenticated itself.
    pub(super) fn peer(&self) -> &TlsPeer {
        self.tls.peer()
    }

    /// Decrypts what was received into `plain`; returns the number of bytes.
    fn decrypt(&mut self, plain: &mut [u8]) -> io::Result<usize> {
        let received = self.tls.receive(&self.incoming, plain).map_err(io::Error::other)?;
        self.incoming.drain(..received.taken);
        Ok(received.given)
    }

    /// Receives records; returns the number of bytes, which is 0 at the end.
    fn poll_receive(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut chunk = [0; CHUNK];
        let mut received = ReadBuf::new(&mut chunk);
        ready!(Pin::new(&mut self.socket).poll_read(context, &mut received))?;
        self.incoming.extend_from_slice(received.filled());
        Poll::Ready(Ok(received.filled().len()))
    }

    /// Sends the library's output.
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let output = self.tls.output();
        while self.sent < output.len() {
            let sent = ready!(Pin::new(&mut self.socket).poll_write(context, &output[self.sent..]))?;
            self.sent += sent;
        }
        output.clear();
        self.sent = 0;
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for TlsStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream = self.get_mut();
        loop {
            let given = stream.decrypt(buffer.initialize_unfilled());
            // What is not sent yet, such as an alert, is sent by the next read, write or flush.
            let _ = stream.poll_send(context)?;
            let given = given?;
            if given > 0 || stream.tls.has_ended() {
                buffer.advance(given);
                return Poll::Ready(Ok(()));
            }
            if ready!(stream.poll_receive(context))? == 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for TlsStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let stream = self.get_mut();
        // Bounds the output.
        ready!(stream.poll_send(context))?;
        let bytes = &bytes[..bytes.len().min(CHUNK)];
        stream.tls.send(bytes).map_err(io::Error::other)?;
        let _ = stream.poll_send(context)?;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let stream = self.get_mut();
        ready!(stream.poll_send(context))?;
        Pin::new(&mut stream.socket).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let stream = self.get_mut();
        // Returns at once when called again.
        stream.tls.close();
        ready!(stream.poll_send(context))?;
        Pin::new(&mut stream.socket).poll_shutdown(context)
    }
}

impl AsFd for TlsStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The type of the record that a TLS connection begins with.
const HANDSHAKE: u8 = 22;
/// Number of bytes that are received or encrypted at a time.
const CHUNK: usize = 16 << 10;

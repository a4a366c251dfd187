//! The end of an API client's connection: a request whose head has not arrived does not delay it.

use super::endpoint::AnyStream;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Whether a connection ends. Clones refer to the same connection.
#[derive(Clone, Default)]
pub(super) struct Ending(Arc<EndingState>);

#[derive(Default)]
struct EndingState {
    /// No further request is read.
    has_begun: AtomicBool,
    /// The head of a request has arrived, and the request has no response yet.
    is_under_way: AtomicBool,
}

/// A request that is under way until this is dropped.
pub(super) struct RequestUnderWay(Ending);

/// A connection that reads as closed between requests once its end has begun. The HTTP library
/// alone would wait for the rest of a head.
pub(super) struct EndableStream {
    /// The connection itself.
    pub(super) stream: AnyStream,
    ending: Ending,
}

impl Ending {
    /// Lets the connection end. The caller polls the connection afterwards.
    pub(super) fn begin(&self) {
        self.0.has_begun.store(true, Ordering::Relaxed);
    }

    /// Marks a request as under way.
    pub(super) fn request(&self) -> RequestUnderWay {
        self.0.is_under_way.store(true, Ordering::Relaxed);
        RequestUnderWay(self.clone())
    }

    fn is_between_requests(&self) -> bool {
        self.0.has_begun.load(Ordering::Relaxed) && !self.0.is_under_way.load(Ordering::Relaxed)
    }
}

impl Drop for RequestUnderWay {
    fn drop(&mut self) {
        self.0.0.is_under_way.store(false, Ordering::Relaxed);
    }
}

impl EndableStream {
    pub(super) fn new(stream: AnyStream, ending: Ending) -> EndableStream {
        EndableStream { stream, ending }
    }
}

impl AsyncRead for EndableStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let own = self.get_mut();
        if own.ending.is_between_requests() {
            // An end of the stream. Responses are still written.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut own.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for EndableStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

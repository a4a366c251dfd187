//! A minimal NBD client, for requests that no well-behaved client sends.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

pub(crate) struct RawClient {
    socket: Box<dyn ReadWrite>,
}

pub(crate) trait ReadWrite: Read + Write {}
impl<T: Read + Write> ReadWrite for T {}

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISC: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const WRITE_ZEROES: u16 = 6;
pub(crate) const FUA: u16 = 1;
const NBD_REP_ACK: u32 = 1;
const NBD_REP_INFO: u32 = 3;

impl RawClient {
    /// Connects and goes to transmission with `NBD_OPT_EXPORT_NAME`, the default export.
    pub(crate) fn connect(path: &Path) -> RawClient {
        RawClient::over(UnixStream::connect(path).unwrap())
    }

    /// A client of the default export over a socket that has just been connected, after the
    /// handshake.
    pub(crate) fn over(socket: impl ReadWrite + 'static) -> RawClient {
        RawClient::with_export(socket, "")
    }

    /// A client of an export over a socket that has just been connected, after the handshake.
    pub(crate) fn with_export(socket: impl ReadWrite + 'static, name: &str) -> RawClient {
        let mut socket: Box<dyn ReadWrite> = Box::new(socket);
        let mut greeting = [0; 18];
        socket.read_exact(&mut greeting).unwrap();
        // NBD_FLAG_C_FIXED_NEWSTYLE and NBD_FLAG_C_NO_ZEROES, then the option with the name.
        socket.write_all(&3u32.to_be_bytes()).unwrap();
        socket
            .write_all(
                &[
                    b"IHAVEOPT".as_slice(),
                    &1u32.to_be_bytes(),
                    &(name.len() as u32).to_be_bytes(),
                    name.as_bytes(),
                ]
                .concat(),
            )
            .unwrap();
        let mut export = [0; 10];
        socket.read_exact(&mut export).unwrap();
        RawClient { socket }
    }

    /// A client of the default export that requests the block sizes and so has to respect them.
    pub(crate) fn respecting_sizes(path: &Path) -> RawClient {
        let mut socket = UnixStream::connect(path).unwrap();
        socket.read_exact(&mut [0; 18]).unwrap();
        socket.write_all(&3u32.to_be_bytes()).unwrap();
        // NBD_OPT_GO with an empty name and NBD_INFO_BLOCK_SIZE.
        socket.write_all(b"IHAVEOPT\0\0\0\x07\0\0\0\x08\0\0\0\0\0\x01\0\x03").unwrap();
        loop {
            let mut head = [0; 20];
            socket.read_exact(&mut head).unwrap();
            let [.., kind, length] = *head.as_chunks::<4>().0 else { panic!("five words") };
            let mut data = vec![0; u32::from_be_bytes(length) as usize];
            socket.read_exact(&mut data).unwrap();
            match u32::from_be_bytes(kind) {
                NBD_REP_ACK => return RawClient { socket: Box::new(socket) },
                kind => assert_eq!(kind, NBD_REP_INFO),
            }
        }
    }

    /// Sends a request's head.
    pub(crate) fn request(&mut self, command: u16, flags: u16, offset: u64, len: u32) {
        let mut head = 0x2560_9513_u32.to_be_bytes().to_vec();
        head.extend(flags.to_be_bytes());
        head.extend(command.to_be_bytes());
        head.extend(7u64.to_be_bytes());
        head.extend(offset.to_be_bytes());
        head.extend(len.to_be_bytes());
        self.socket.write_all(&head).unwrap();
    }

    pub(crate) fn send(&mut self, payload: &[u8]) {
        self.socket.write_all(payload).unwrap();
    }

    /// The error of a simple reply.
    pub(crate) fn reply(&mut self) -> u32 {
        let mut reply = [0; 16];
        self.socket.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..4], 0x6744_6698_u32.to_be_bytes());
        assert_eq!(reply[8..], 7u64.to_be_bytes());
        u32::from_be_bytes([reply[4], reply[5], reply[6], reply[7]])
    }

    /// The error of a request without payload.
    pub(crate) fn simple(&mut self, command: u16, flags: u16, offset: u64, len: u32) -> u32 {
        self.request(command, flags, offset, len);
        self.reply()
    }

    pub(crate) fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u32 {
        self.request(WRITE, flags, offset, data.len() as u32);
        self.send(data);
        self.reply()
    }

    pub(crate) fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.request(READ, 0, offset, len as u32);
        assert_eq!(self.reply(), 0);
        self.take(len)
    }

    /// Reads this many bytes from the server.
    pub(crate) fn take(&mut self, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.socket.read_exact(&mut data).unwrap();
        data
    }

    /// Whether the server has closed the connection.
    pub(crate) fn is_closed(&mut self) -> bool {
        matches!(self.socket.read(&mut [0]), Ok(0) | Err(_))
    }
}

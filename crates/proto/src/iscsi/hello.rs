//! Hello and HelloReply of iSER, where an initiator says in the login that it wants them (RFC 7145 §5.1, §9.3, §9.4).
//!
//! Then they are the first messages of full feature phase, one each way. The initiator says which versions of iSER it
//! speaks and how many reads of its memory it answers at a time (iSER-IRD), the target which version it takes and how many
//! it will have on their way (iSER-ORD). Nothing else is sent before. Linux neither asks for that nor answers.

use crate::session::ProtocolError;
use blockmux_volume::Seg;
use blockmux_wire::iser::{FLAG_REJECT, HEADER_LEN, HelloHeader, IserOpcode, VERSION};
use zerocopy::{FromBytes, IntoBytes};

/// A greeting, as it is sent.
pub(super) type Greeting = [u8; HEADER_LEN];

/// How far the greeting of one connection is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Greeted {
    /// None was agreed on, or it is over.
    #[default]
    Over,
    /// It is to be sent.
    Due(Greeting),
    /// The other side's is the next message.
    Awaited,
}

/// An initiator's, which answers so many reads at a time.
pub(super) fn hello(ird: u32) -> Greeting {
    let ird = u16::try_from(ird).unwrap_or(u16::MAX);
    greeting(HelloHeader::new(IserOpcode::HELLO, [VERSION; 2], ird))
}

/// What a target answers that would have so many reads on their way, and how many it may have; it is refused where no
/// version is the same, or nothing could be read.
pub(super) fn reply(message: &Seg, ord: u32) -> Result<(Greeting, Option<u32>), ProtocolError> {
    let hello = read(message, IserOpcode::HELLO)?;
    let [most, least] = hello.versions();
    let ord = ord.min(hello.reads.get().into());
    let is_taken = (least..=most).contains(&VERSION) && ord > 0;
    let mut answer = HelloHeader::new(IserOpcode::HELLO_REPLY, [VERSION; 2], ord as u16); // of 16 bits
    if !is_taken {
        answer.opcode_flags |= FLAG_REJECT;
    }
    Ok((greeting(answer), is_taken.then_some(ord)))
}

/// Takes a target's answer to an initiator that answers so many reads at a time.
pub(super) fn take_reply(message: &Seg, ird: u32) -> Result<(), ProtocolError> {
    let reply = read(message, IserOpcode::HELLO_REPLY)?;
    let [_, current] = reply.versions();
    if reply.opcode_flags & FLAG_REJECT != 0 {
        return Err(error("refused the connection in its HelloReply", "RFC 7145 §9.4"));
    }
    if current != VERSION || u32::from(reply.reads.get()) > ird {
        return Err(error(
            "answered Hello with a version or an iSER-ORD that was not offered",
            "RFC 7145 §5.1, §9.4",
        ));
    }
    Ok(())
}

fn greeting(header: HelloHeader) -> Greeting {
    let mut greeting = [0; HEADER_LEN];
    greeting.copy_from_slice(header.as_bytes());
    greeting
}

fn read(message: &Seg, opcode: IserOpcode) -> Result<HelloHeader, ProtocolError> {
    let mut bytes = [0; HEADER_LEN];
    if message.len() == HEADER_LEN {
        message.copy_to(&mut bytes);
    }
    let header = HelloHeader::read_from_bytes(&bytes).map_err(|_| NO_GREETING)?;
    if header.opcode() == opcode { Ok(header) } else { Err(NO_GREETING) }
}

fn error(what: &'static str, reference: &'static str) -> ProtocolError {
    ProtocolError { what, reference }
}

const NO_GREETING: ProtocolError = ProtocolError {
    what: "did not begin with the Hello or HelloReply that was agreed on",
    reference: "RFC 7145 §5.1",
};

#[cfg(test)]
mod tests {
    use super::*;

    fn seg(bytes: &[u8]) -> Seg {
        let mut whole = bytes.to_vec();
        whole.resize(HEADER_LEN, 0);
        Seg::from_slice(&whole)
    }

    #[test]
    fn a_greeting_is_answered_with_the_reads_that_both_can() {
        let said = hello(32);
        assert_eq!(said[..5], [0x20, 0xaa, 0, 32, 0]);
        for (ord, common) in [(8, 8), (100, 32)] {
            let (answer, taken) = reply(&seg(&said), ord).unwrap();
            assert_eq!((answer[..4].to_vec(), taken), (vec![0x30, 0xaa, 0, common], Some(common.into())));
            take_reply(&seg(&answer), 32).unwrap();
            assert!(take_reply(&seg(&answer), u32::from(common) - 1).is_err());
        }
    }

    #[test]
    fn versions_and_reads_that_do_not_fit_are_refused_and_said_to_be() {
        for (versions, reads, is_taken) in [
            (0xaa, 1, true),
            (0xf1, 1, true),
            (0xfb, 1, false),
            (0x91, 1, false),
            (0x11, 1, false),
            (0xaa, 0, false),
        ] {
            let (answer, taken) = reply(&seg(&[0x20, versions, 0, reads]), 4).unwrap();
            assert_eq!((taken.is_some(), answer[0]), (is_taken, if is_taken { 0x30 } else { 0x31 }));
            assert_eq!(take_reply(&seg(&answer), 4).is_ok(), is_taken);
        }
        assert!(take_reply(&seg(&[0x30, 0xa1, 0, 1]), 4).is_err(), "that version was not offered");
        for wrong in [&[0x10, 0xaa, 0, 1][..], &[0x30, 0xaa, 0, 1], &[]] {
            assert_eq!(reply(&seg(wrong), 4).unwrap_err(), NO_GREETING);
        }
        assert_eq!(take_reply(&seg(&[0x20, 0xaa, 0, 1]), 4).unwrap_err(), NO_GREETING);
        for len in [0, 4, HEADER_LEN - 1, HEADER_LEN + 48] {
            let message = Seg::from_slice(&vec![0x20; len]);
            assert!(reply(&message, 4).is_err() && take_reply(&message, 4).is_err());
        }
    }
}

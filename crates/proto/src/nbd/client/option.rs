//! Writing options and parsing the data of their replies (proto.md, "Option types", "Option reply
//! types").

use super::export::{BlockSize, ListedExport};
use crate::driver::outbox::Outbox;
use crate::driver::session::ProtocolError;
use blockmux_wire::nbd::NBD_MAX_STRING;
use blockmux_wire::nbd::handshake::{Info, InfoBlockSize, InfoExport, NBD_OPTS_MAGIC, Opt, OptionHead};
use zerocopy::{FromBytes, IntoBytes};

/// Queues an option without data.
pub(super) fn send_plain(outbox: &mut Outbox, option: Opt) {
    send(outbox, option, &[]);
}

/// Queues `NBD_OPT_EXPORT_NAME`; its data is the name, without a length.
pub(super) fn send_export_name(outbox: &mut Outbox, export: &str) {
    send(outbox, Opt::NBD_OPT_EXPORT_NAME, export.as_bytes());
}

/// Queues `NBD_OPT_GO` or `NBD_OPT_INFO`.
pub(super) fn send_go(outbox: &mut Outbox, option: Opt, export: &str) {
    let mut data = string(export);
    let requested = [Info::NBD_INFO_NAME, Info::NBD_INFO_DESCRIPTION, Info::NBD_INFO_BLOCK_SIZE];
    data.extend((requested.len() as u16).to_be_bytes());
    requested.iter().for_each(|info| data.extend(info.0.to_be_bytes()));
    send(outbox, option, &data);
}

/// Queues `NBD_OPT_SET_META_CONTEXT` or `NBD_OPT_LIST_META_CONTEXT`.
pub(super) fn send_meta_context(outbox: &mut Outbox, option: Opt, export: &str, queries: &[&str]) {
    let mut data = string(export);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend(string(query)));
    send(outbox, option, &data);
}

/// The data of one `NBD_REP_INFO`.
#[derive(Debug)]
pub(super) enum InfoReply {
    Export {
        size: u64,
        flags: u16,
    },
    Name(String),
    Description(String),
    BlockSize(BlockSize),
    /// An unknown type, which is ignored.
    Unknown,
}

/// Parses the data of `NBD_REP_INFO`.
pub(super) fn read_info(data: &[u8]) -> Result<InfoReply, ProtocolError> {
    let Some((kind, text)) = data.split_first_chunk() else {
        return fault("sent an information reply shorter than its type");
    };
    Ok(match Info(u16::from_be_bytes(*kind)) {
        Info::NBD_INFO_EXPORT => match InfoExport::read_from_bytes(data) {
            Ok(info) => InfoReply::Export { size: info.size.get(), flags: info.transmission_flags.get() },
            Err(_) => return fault("sent an NBD_INFO_EXPORT that is not 12 bytes long"),
        },
        Info::NBD_INFO_BLOCK_SIZE => match InfoBlockSize::read_from_bytes(data) {
            Ok(info) => InfoReply::BlockSize(BlockSize::from_wire(&info)?),
            Err(_) => return fault("sent an NBD_INFO_BLOCK_SIZE that is not 14 bytes long"),
        },
        Info::NBD_INFO_NAME => InfoReply::Name(read_string(text)?),
        Info::NBD_INFO_DESCRIPTION => InfoReply::Description(read_string(text)?),
        _ => InfoReply::Unknown,
    })
}

/// Parses the data of `NBD_REP_SERVER`.
pub(super) fn read_server(data: &[u8]) -> Result<ListedExport, ProtocolError> {
    let (name, description) = data
        .split_first_chunk()
        .and_then(|(len, rest)| rest.split_at_checked(u32::from_be_bytes(*len) as usize))
        .ok_or(error("listed an export whose name is longer than the reply"))?;
    Ok(ListedExport { name: read_string(name)?, description: read_string(description)? })
}

/// Parses the data of `NBD_REP_META_CONTEXT`: the context's id and name.
pub(super) fn read_meta_context(data: &[u8]) -> Result<(u32, String), ProtocolError> {
    let (id, name) =
        data.split_first_chunk().ok_or(error("sent a metadata context shorter than its number"))?;
    Ok((u32::from_be_bytes(*id), read_string(name)?))
}

fn send(outbox: &mut Outbox, option: Opt, data: &[u8]) {
    let head = OptionHead {
        magic: NBD_OPTS_MAGIC.into(),
        option: option.0.into(),
        length: (data.len() as u32).into(),
    };
    outbox.push_head(head.as_bytes());
    outbox.push_head(data);
}

fn string(text: &str) -> Vec<u8> {
    let mut data = (text.len() as u32).to_be_bytes().to_vec();
    data.extend(text.as_bytes());
    data
}

fn read_string(bytes: &[u8]) -> Result<String, ProtocolError> {
    let reference = "proto.md, \"Conventions\"";
    if bytes.len() > NBD_MAX_STRING {
        return Err(ProtocolError { what: "sent a string of more than 4096 bytes", reference });
    }
    let text = std::str::from_utf8(bytes);
    let text = text.map_err(|_| ProtocolError { what: "sent a string that is not UTF-8", reference })?;
    Ok(text.to_owned())
}

const fn error(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "proto.md, \"Option reply types\"" }
}

fn fault<T>(what: &'static str) -> Result<T, ProtocolError> {
    Err(error(what))
}

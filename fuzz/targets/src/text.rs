//! Text from users: URIs, volume specs and job files. It must parse, or be refused in one line.

use blockmux_proto::aoe;
use blockmux_proto::fabrics;
use blockmux_proto::iscsi;
use blockmux_proto::nbd::uri::NbdUri;
use blockmux_proto::srp::url::SrpUrl;
use blockmux_volume::Spec;
use std::fmt::{Debug, Display};
use std::str::FromStr;

/// Reads `data` as an AoE URL.
pub(crate) fn aoe_url(data: &[u8]) {
    reads_back::<aoe::url::AoeUrl>(data);
}

/// Reads `data` as an NBD URI.
pub(crate) fn nbd_uri(data: &[u8]) {
    reads_back::<NbdUri>(data);
}

/// Reads `data` as an iSCSI URL.
pub(crate) fn iscsi_url(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match text.parse::<iscsi::url::IscsiUrl>() {
        Ok(url) if url.password.is_some() => {
            let shown = url.to_string();
            assert!(shown.starts_with("iscsi://") && shown.parse::<iscsi::url::IscsiUrl>().is_err());
        }
        Ok(_) => reads_back::<iscsi::url::IscsiUrl>(data),
        Err(error) => is_one_line(&error),
    }
}

/// Reads `data` as an NVMe/TCP URL.
pub(crate) fn nvme_url(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match text.parse::<fabrics::url::NvmeUrl>() {
        Ok(_) => reads_back::<fabrics::url::NvmeUrl>(data),
        Err(error) => is_one_line(&error),
    }
}

/// Reads `data` as an SRP URL.
pub(crate) fn srp_url(data: &[u8]) {
    reads_back::<SrpUrl>(data);
}

/// Reads `data` as a volume spec.
pub(crate) fn volume_spec(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match text.parse::<Spec>() {
        // The written form has no passwords; it must parse to itself.
        Ok(spec) => reads_back::<Spec>(spec.to_string().as_bytes()),
        Err(error) => is_one_line(&error),
    }
}

/// Reads `data` as a job file of fio.
pub(crate) fn fio_job_file(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let environment = |name: &str| (name == "SIZE").then(|| "64m".to_owned());
    match blockmux_lab::job_file::parse(text, "job.fio", environment) {
        Ok(file) => {
            let (jobs, lines) = (file.jobs, text.lines().count());
            assert!(!jobs.is_empty());
            assert!(jobs.iter().all(|job| 1 <= job.line && job.line <= lines));
            assert!(jobs.is_sorted_by_key(|job| job.line));
        }
        Err(error) => {
            is_one_line(&error);
            assert!(error.to_string().starts_with("job.fio:"));
        }
    }
}

/// Checks that the value is written in a form that parses to the same value.
fn reads_back<T>(data: &[u8])
where
    T: FromStr<Err: Display> + Display + Debug + PartialEq,
{
    let Ok(text) = std::str::from_utf8(data) else { return };
    match text.parse::<T>() {
        Ok(value) => {
            let written = value.to_string();
            match written.parse::<T>() {
                Ok(again) => assert_eq!(again, value, "{written:?} parses to another value"),
                Err(error) => panic!("{value:?} is written as {written:?}, which does not parse: {error}"),
            }
        }
        Err(error) => is_one_line(&error),
    }
}

fn is_one_line(error: &impl Display) {
    let text = error.to_string();
    assert!(!text.is_empty() && !text.contains(['\n', '\r']), "{text:?} is not one line");
}

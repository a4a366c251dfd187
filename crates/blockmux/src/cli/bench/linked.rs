//! The cases of a suite that is measured over virtual links.

use super::BenchArgs;
use super::case::{BenchCase, CaseKind};
use super::jobs::times;
use super::plan::{BenchPlan, BenchVolume, check_spared};
use super::veth::VethPair;
use crate::failure::Failure;
use crate::protocol;
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_lab::job::Job;
use blockmux_lab::link::{self, Link, Links};
use blockmux_lab::suite::Suite;

impl BenchPlan {
    /// Adds every job on the local volumes, then with each protocol over each link.
    ///
    /// # Errors
    /// If the veth pair cannot be created.
    pub(super) fn add_linked(
        &mut self,
        suite: &Suite,
        links: &Links,
        args: &BenchArgs,
        volumes: &[BenchVolume],
        policies: &[PollPolicy],
    ) -> Result<(), Failure> {
        let Some(served) = volumes.first() else { return Ok(()) };
        let times = times(args)?;
        let mut rows = suite.rows(times.runtime_ms, times.ramp_time_ms);
        rows.retain(|row| args.measures(&row.protocol));
        check_spared(args, &rows, volumes)?;
        let veth = VethPair::new()?;
        let refused = refused(&veth, links);
        for row in &rows {
            let case = |kind, target: &BenchVolume, place| BenchCase {
                kind,
                job: row.job.clone(),
                target: target.shown.clone(),
                place,
            };
            let Some(protocol) = protocol::by_name(&row.protocol) else {
                for volume in volumes {
                    self.cases.push(case(
                        CaseKind::Local(volume.volume.clone()),
                        volume,
                        volume.place.clone(),
                    ));
                }
                continue;
            };
            for link in links.of(&row.protocol) {
                if let Some((_, why)) = refused.iter().find(|(rate, _)| *rate == link.gbit_per_s) {
                    self.skipped.push((name(&row.job, &row.protocol, link), why.clone()));
                    continue;
                }
                let kind = |poll| CaseKind::Linked(protocol, served.volume.clone(), poll, link);
                let linked = policies.iter().map(|&poll| case(kind(poll), served, link.to_string()));
                self.cases.extend(linked);
            }
        }
        // Local rows first, as everywhere, and jobs in their order.
        let order: Vec<Job> = rows.iter().map(|row| row.job.clone()).collect();
        self.cases.sort_by_key(|case| {
            (order.iter().position(|job| *job == case.job), !matches!(case.kind, CaseKind::Local(_)))
        });
        self.veth = Some(veth);
        Ok(())
    }
}

/// The speed limits that this system does not support, with the reason.
pub(super) fn refused(veth: &VethPair, links: &Links) -> Vec<(Option<u32>, String)> {
    let mut tried: Vec<Option<u32>> = Vec::new();
    let mut refused = Vec::new();
    for link in links.of("aoe") {
        if !tried.contains(&link.gbit_per_s) {
            tried.push(link.gbit_per_s);
            refused.extend(veth.set(link).err().map(|why| (link.gbit_per_s, why)));
        }
    }
    refused
}

fn name(job: &Job, protocol: &str, link: Link) -> String {
    format!("{}, {}", job.name, link::row_name(protocol, &link.to_string()))
}

/// Specs of RAM stripes of `bytes` in total, each with its name.
pub(super) fn stripes(links: &Links, bytes: u64) -> Vec<(String, String)> {
    let stripe = |&members: &u32| {
        let each = (bytes / u64::from(members.max(1)) / MIB).max(1);
        let all = vec![format!("mem:{each}m"); members as usize];
        (format!("stripe:{}", all.join(",")), link::stripe(members))
    };
    links.stripes.iter().map(stripe).collect()
}

const MIB: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Spec;

    #[test]
    fn members_of_stripes_have_whole_mebibytes() {
        let suite = Suite::by_name("aatrokoski-2007").unwrap();
        let stripes = stripes(suite.links().unwrap(), 64 << 20);
        assert_eq!(stripes[0].1, "4-way stripe");
        assert!(stripes[1].0.starts_with("stripe:mem:5m,mem:5m,"), "{}", stripes[1].0);
        assert!(stripes.iter().all(|(spec, _)| spec.parse::<Spec>().is_ok()));
    }
}

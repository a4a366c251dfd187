//! This daemon as a member of a group of gateways, which decides which of them serves each volume
//! with `exclusive=group` (decision 125).
//!
//! | module | what it knows |
//! |---|---|
//! | `config` | the table `[group]`, and which volumes fit it |
//! | `member` | starting the member, adding volumes to the group, leaving it |
//! | `status` | what is told of the group, and what operators change |

mod config;
mod member;
mod status;

pub(super) use self::config::{GroupConfig, GroupVolumeConfig, check, image_of_group};
pub(super) use self::member::{GroupMember, GroupSlot, ServedVolumes};

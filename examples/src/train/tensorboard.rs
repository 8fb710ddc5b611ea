//! TensorBoard's event files: records of the TFRecord format, each a protocol-buffer `Event`.
//!
//! ```text
//! u64 length | u32 masked crc32c of it | the event | u32 masked crc32c of the event        (little-endian)
//! ```

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use prost::Message;

/// The fields of `tensorflow.Event` that are written here.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    /// Part of a `oneof` there: 0 is written, too.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// With status 1, START, TensorBoard forgets what it has read of this step and later ones.
#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

const START: i32 = 1;

/// Writes one event file.
#[derive(Debug)]
pub struct EventWriter {
    file: BufWriter<File>,
}

impl EventWriter {
    /// Creates a new file in `folder`, for a run that goes on after `step`: what earlier files have of later steps no longer
    /// counts.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(folder: &Path, step: u64) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        // TensorBoard reads the files of a folder in the order of their names.
        let micros = now().as_micros();
        let name = format!("events.out.tfevents.{micros:020}.{}", std::process::id());
        let path = folder.join(name);
        let file =
            File::create_new(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let mut writer = Self {
            file: BufWriter::new(file),
        };
        writer.write(Event {
            file_version: Some("brain.Event:2".to_string()),
            ..Event::default()
        })?;
        if step > 0 {
            writer.write(Event {
                step: i64::try_from(step + 1)?,
                session_log: Some(SessionLog { status: START }),
                ..Event::default()
            })?;
        }
        writer.flush()?;
        Ok(writer)
    }

    /// Scalars of one step.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> anyhow::Result<()> {
        let value = |(tag, value): &(&str, f64)| Scalar {
            tag: tag.to_string(),
            simple_value: Some(*value as f32),
        };
        self.write(Event {
            step: i64::try_from(step)?,
            summary: Some(Summary {
                value: scalars.iter().map(value).collect(),
            }),
            ..Event::default()
        })
    }

    /// Hands what was written to the system, so that a TensorBoard that is open shows it.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn flush(&mut self) -> anyhow::Result<()> {
        self.file
            .flush()
            .context("cannot write TensorBoard's event file")
    }

    fn write(&mut self, mut event: Event) -> anyhow::Result<()> {
        event.wall_time = now().as_secs_f64();
        let event = event.encode_to_vec();
        let len = (event.len() as u64).to_le_bytes();
        let record = [
            len.as_slice(),
            &masked_crc(&len).to_le_bytes(),
            &event,
            &masked_crc(&event).to_le_bytes(),
        ];
        self.file
            .write_all(&record.concat())
            .context("cannot write TensorBoard's event file")
    }
}

fn now() -> std::time::Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// TFRecord's checksum: a crc32c, rotated and shifted, so that a checksum of data with checksums in it stays a good one.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
        .rotate_right(15)
        .wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_can_be_read_back_zeros_included() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let mut writer = EventWriter::create(folder.path(), 4)?;
        writer.scalars(5, &[("loss", 0.0), ("rate", 0.5)])?;
        writer.flush()?;
        let file = std::fs::read_dir(folder.path())?.next().expect("a file")?;
        let mut rest = &std::fs::read(file.path())?[..];
        let mut events = Vec::new();
        while !rest.is_empty() {
            let len = u64::from_le_bytes(rest[..8].try_into()?) as usize;
            assert_eq!(rest[8..12], masked_crc(&rest[..8]).to_le_bytes());
            let event = &rest[12..12 + len];
            assert_eq!(rest[12 + len..16 + len], masked_crc(event).to_le_bytes());
            events.push(Event::decode(event)?);
            rest = &rest[16 + len..];
        }
        assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
        let start = (
            events[1].step,
            events[1].session_log.as_ref().map(|s| s.status),
        );
        assert_eq!(
            start,
            (5, Some(START)),
            "what was there of step 5 is forgotten"
        );
        let scalars = &events[2].summary.as_ref().expect("a summary").value;
        let values: Vec<_> = scalars
            .iter()
            .map(|s| (s.tag.as_str(), s.simple_value))
            .collect();
        assert_eq!(values, [("loss", Some(0.0)), ("rate", Some(0.5))]);
        Ok(())
    }

    #[test]
    fn checksums_are_those_of_tfrecord() {
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        // The checksum 0x8c28_b28a of eight zero bytes, masked by hand.
        assert_eq!(masked_crc(&0u64.to_le_bytes()), 0x0798_0329);
    }
}

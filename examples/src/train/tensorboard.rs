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
    #[prost(float, tag = "2")]
    simple_value: f32,
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
            simple_value: *value as f32,
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

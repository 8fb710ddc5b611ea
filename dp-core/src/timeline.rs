//! The timeline of a run, drawn from the spans of [`trace`](crate::trace): a file for Perfetto and chrome://tracing.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::FilterFn;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::error::{Error, Result};
use crate::trace::TARGET;

/// Writes the [spans of training steps](crate::trace) to a file in Chrome's Trace Event Format (the JSON array form), which
/// <https://ui.perfetto.dev> and chrome://tracing open.
///
/// Each rank is a process, `pid` = rank, with a lane (`tid`) `compute` for what the rank's own thread does, and lanes
/// `communication`, `communication 2` and so on for the reductions of its buckets, as many as are under way at a time. All
/// events are complete ones (`ph` = `X`) with `ts` and `dur` in microseconds from the begin of the timeline.
///
/// ```standalone_crate
/// # use candle_core::DType;
/// # use candle_nn::Module;
/// # use dp_core::{DistributedDataParallel, ParamStore, Result, Sgd, Timeline, Trainer, World};
/// use tracing_subscriber::layer::SubscriberExt;
///
/// # fn main() -> Result<()> {
/// # let path = std::env::temp_dir().join(format!("timeline-doc-{}.json", std::process::id()));
/// let timeline = Timeline::create(&path)?;
/// let subscriber = tracing_subscriber::registry().with(timeline.layer());
/// tracing::subscriber::set_global_default(subscriber).expect("the only one");
/// World::threads(2)?.run(|rank| -> Result<()> {
///     // build a model, train some steps
/// #   let store = ParamStore::new(rank.device());
/// #   let model = candle_nn::linear(2, 1, store.var_builder(DType::F32))?;
/// #   let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))?;
/// #   let x = candle_core::Tensor::ones((4, 2), DType::F32, rank.device())?;
/// #   trainer.backward(&model.forward(&x)?.sqr()?.mean_all()?)?;
/// #   trainer.step()?;
///     Ok(())
/// })?;
/// timeline.finish()?;
/// # let text = std::fs::read_to_string(&path).expect("it was written");
/// # assert!(text.contains(r#""name":"backward""#), "{text}");
/// # std::fs::remove_file(&path).expect("it is there");
/// # Ok(())
/// # }
/// ```
///
/// Events are written as they end, so memory does not grow with the run. The file is complete when the timeline is finished or
/// dropped, also after a rank has failed; of a process that is killed it lacks the closing bracket and what was in the buffer,
/// and the viewers still open it.
#[must_use = "the file ends when the timeline is dropped"]
pub struct Timeline {
    path: PathBuf,
    begin: Instant,
    writer: Arc<Mutex<Writer>>,
}

impl Timeline {
    /// Creates the file, or replaces it.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be written.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let mut writer = Writer::default();
        match File::create(&path) {
            Ok(file) => writer.out = Some(BufWriter::new(file)),
            Err(e) => return Err(cannot_write(&path, &e)),
        }
        Ok(Self {
            path,
            begin: Instant::now(),
            writer: Arc::new(Mutex::new(writer)),
        })
    }

    /// The layer that draws; add it to a `tracing_subscriber::registry()`. It sees the spans of training steps and nothing else, and
    /// leaves other layers what they see.
    pub fn layer<S: Subscriber + for<'a> LookupSpan<'a>>(&self) -> impl Layer<S> + use<S> {
        let draw = Draw {
            begin: self.begin,
            writer: Arc::clone(&self.writer),
        };
        let spans = FilterFn::new(|metadata| metadata.is_span() && metadata.target() == TARGET);
        draw.with_filter(spans.with_max_level_hint(LevelFilter::DEBUG))
    }

    /// Ends the file. What ends later is not drawn.
    ///
    /// # Errors
    /// [`Error::File`] if anything could not be written, now or before.
    pub fn finish(self) -> Result<()> {
        self.end()
    }

    fn end(&self) -> Result<()> {
        let ended = self.writer.lock().end();
        ended.map_err(|e| cannot_write(&self.path, &e))
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!("the timeline is not complete: {error}");
        }
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

fn cannot_write(path: &Path, error: &io::Error) -> Error {
    Error::File {
        path: path.to_path_buf(),
        message: format!("cannot write the timeline: {error}"),
    }
}

/// The layer of a [`Timeline`].
struct Draw {
    begin: Instant,
    writer: Arc<Mutex<Writer>>,
}

/// A span that is open.
struct Open {
    began: Instant,
    /// Known before the span closes, if it was left, or was over before.
    ended: Option<Instant>,
    lane: usize,
    fields: Fields,
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Draw {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let lane = match attributes.metadata().name() {
            "reduction" => self.writer.lock().occupy_lane(fields.rank),
            _ => COMPUTE,
        };
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(Open {
                began: Instant::now(),
                ended: None,
                lane,
                fields,
            });
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            values.record(&mut open.fields);
            let ago = open.fields.completed_ns_ago.map(Duration::from_nanos);
            open.ended = ago.and_then(|ago| Instant::now().checked_sub(ago));
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            open.ended = Some(Instant::now());
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else {
            return;
        };
        let Some(open) = span.extensions_mut().remove::<Open>() else {
            return;
        };
        // A reduction on a link that says when it was through may have been through before its span was there.
        let ended = open.ended.unwrap_or_else(Instant::now).max(open.began);
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        let mut writer = self.writer.lock();
        if !open.fields.discarded {
            let name = match open.fields.bucket {
                Some(bucket) => &format!("{} of bucket {bucket}", span.name()),
                None => span.name(),
            };
            writer.event(&Event {
                name,
                cat: lane_kind(open.lane),
                ph: "X",
                ts: Some(micros(open.began - self.begin)),
                dur: Some(micros(ended - open.began)),
                pid: open.fields.rank,
                tid: open.lane,
                args: &open.fields,
            });
        }
        writer.leave_lane(open.fields.rank, open.lane);
    }
}

/// The lane of what a rank's own thread does. Communication has those above.
const COMPUTE: usize = 0;

fn lane_kind(lane: usize) -> &'static str {
    match lane {
        COMPUTE => "compute",
        _ => "communication",
    }
}

/// One event of the format. `ts` and `dur` in microseconds.
#[derive(Serialize)]
struct Event<'a, A: Serialize> {
    name: &'a str,
    cat: &'a str,
    ph: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: usize,
    tid: usize,
    args: &'a A,
}

/// The fields of a span; those it has are shown with its event.
#[derive(Debug, Default, Serialize)]
struct Fields {
    #[serde(skip)]
    rank: usize,
    step: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    micro_batch: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bucket: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    op: Option<String>,
    #[serde(skip)]
    completed_ns_ago: Option<u64>,
    #[serde(skip)]
    discarded: bool,
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "rank" => self.rank = value as usize,
            "step" => self.step = value,
            "micro_batch" => self.micro_batch = Some(value),
            "bucket" => self.bucket = Some(value),
            "bytes" => self.bytes = Some(value),
            "completed_ns_ago" => self.completed_ns_ago = Some(value),
            _ => {}
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        if field.name() == "discarded" {
            self.discarded = value;
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "op" {
            self.op = Some(format!("{value:?}"));
        }
    }
}

/// The file, and which lanes there are.
#[derive(Default)]
struct Writer {
    /// `None` once it has ended, or failed.
    out: Option<BufWriter<File>>,
    failure: Option<io::Error>,
    /// An event has been written.
    begun: bool,
    /// Per rank and lane: something is under way there.
    lanes: BTreeMap<usize, Vec<bool>>,
}

impl Writer {
    /// The first lane for communication that is free.
    fn occupy_lane(&mut self, rank: usize) -> usize {
        let lanes = self.lanes.entry(rank).or_default();
        let free = (COMPUTE + 1..lanes.len()).find(|lane| !lanes[*lane]);
        let lane = free.unwrap_or(lanes.len().max(COMPUTE + 1));
        self.introduce(rank, lane);
        if let Some(lanes) = self.lanes.get_mut(&rank) {
            lanes[lane] = true;
        }
        lane
    }

    fn leave_lane(&mut self, rank: usize, lane: usize) {
        let lane = self.lanes.get_mut(&rank).and_then(|l| l.get_mut(lane));
        lane.into_iter().for_each(|occupied| *occupied = false);
    }

    /// Names a rank's lanes up to `lane`, and the rank with the first.
    fn introduce(&mut self, rank: usize, lane: usize) {
        let known = self.lanes.entry(rank).or_default().len();
        if known == 0 {
            self.metadata(
                "process_name",
                rank,
                0,
                &Name {
                    name: &format!("rank {rank}"),
                },
            );
            self.metadata(
                "process_sort_index",
                rank,
                0,
                &SortIndex { sort_index: rank },
            );
        }
        for lane in known..=lane {
            let name = match lane {
                COMPUTE | 1 => lane_kind(lane).to_string(),
                _ => format!("{} {lane}", lane_kind(lane)),
            };
            self.metadata("thread_name", rank, lane, &Name { name: &name });
            self.metadata(
                "thread_sort_index",
                rank,
                lane,
                &SortIndex { sort_index: lane },
            );
            self.lanes.entry(rank).or_default().push(false);
        }
    }

    fn metadata(&mut self, name: &str, pid: usize, tid: usize, args: &impl Serialize) {
        self.write(&Event {
            name,
            cat: "__metadata",
            ph: "M",
            ts: None,
            dur: None,
            pid,
            tid,
            args,
        });
    }

    fn event(&mut self, event: &Event<'_, Fields>) {
        self.introduce(event.pid, event.tid);
        self.write(event);
    }

    fn write(&mut self, event: &impl Serialize) {
        let Some(out) = &mut self.out else { return };
        let separator: &[u8] = if self.begun { b",\n" } else { b"[\n" };
        self.begun = true;
        let written = out.write_all(separator);
        let written = written.and_then(|()| Ok(serde_json::to_writer(out, event)?));
        if let Err(error) = written {
            // Said at the end; a timeline is no reason to stop training.
            self.failure = Some(error);
            self.out = None;
        }
    }

    /// Ends the file; the second time there is nothing to do.
    fn end(&mut self) -> io::Result<()> {
        if let Some(mut out) = self.out.take() {
            let end: &[u8] = if self.begun { b"\n]\n" } else { b"[]\n" };
            out.write_all(end)?;
            out.flush()?;
        }
        self.failure.take().map_or(Ok(()), Err)
    }
}

#[derive(Serialize)]
struct Name<'a> {
    name: &'a str,
}

#[derive(Serialize)]
struct SortIndex {
    sort_index: usize,
}

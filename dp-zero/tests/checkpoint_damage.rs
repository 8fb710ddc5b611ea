use std::fs;
use std::path::{Path, PathBuf};

use dp_core::checkpoint::{Checkpoint, CheckpointProblem};
use dp_core::{Error, LoadOptions, Trainer};
use dp_zero::Sharding;
use sha2::{Digest, Sha256};

use crate::checkpoint::folder;
use crate::checkpoint_faults::{model, parts, step};
use crate::support::{STRATEGIES, ranks, same_on_all, values};

/// Case C44, the broken files: one byte short, empty, damaged, swapped, of another checkpoint, not JSON, another version.
/// An explicit load says which file; the run's other checkpoint loads.
#[test]
fn c44_broken_files_are_named() {
    let (_guard, run) = folder();
    let to = run.clone();
    let folders = same_on_all(ranks(2, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero2, &rank)?;
        let mut folders = Vec::new();
        for _ in 0..2 {
            folders.push(trainer.save(&to)?);
            step(&mut trainer, &p, &q)?;
        }
        Ok(folders)
    }));
    let (good, bad) = (folders[0].clone(), folders[1].clone());
    let [shard0, shard1, manifest] = [
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
        "manifest.json",
    ];
    let read = |folder: &Path, name: &str| fs::read(folder.join(name)).expect("a file");
    let (original0, original1, original) =
        (read(&bad, shard0), read(&bad, shard1), read(&bad, manifest));
    let text = String::from_utf8(original.clone()).expect("text");
    let mut flipped = original1.clone();
    *flipped.last_mut().expect("not empty") ^= 1;
    let version = text
        .replace("\"version\": 1", "\"version\": 2")
        .into_bytes();
    let edited = text.replace("\"step\": 1", "\"step\": 9").into_bytes();
    let cases: [(&str, Vec<u8>, CheckpointProblem); 10] = [
        (
            shard1,
            original1[..original1.len() - 1].to_vec(),
            CheckpointProblem::Corrupt,
        ),
        (shard1, Vec::new(), CheckpointProblem::Corrupt),
        (shard1, flipped, CheckpointProblem::Corrupt),
        (shard1, original0.clone(), CheckpointProblem::Corrupt),
        (shard1, read(&good, shard1), CheckpointProblem::Corrupt),
        (manifest, read(&good, manifest), CheckpointProblem::Corrupt),
        (manifest, Vec::new(), CheckpointProblem::Corrupt),
        (
            manifest,
            text[..text.len() / 2].into(),
            CheckpointProblem::Corrupt,
        ),
        (manifest, version, CheckpointProblem::Version),
        (manifest, edited, CheckpointProblem::Corrupt),
    ];
    for (i, (file, content, expected)) in cases.into_iter().enumerate() {
        fs::write(bad.join(file), content).expect("writable");
        let (run, broken, good) = (run.clone(), bad.clone(), good.clone());
        ranks(3, move |rank| {
            let (_, _, mut trainer) = model(Sharding::Zero1, &rank)?;
            let before = trainer.store().sha256()?;
            for path in [&run, &broken] {
                let error = trainer.load(path).expect_err("broken");
                // With the older manifest it is the shards that are wrong.
                let named = if i == 5 { shard0 } else { file };
                assert!(error.to_string().contains(named), "case {i}: {error}");
                assert_eq!(parts(Err::<(), _>(error)).1, expected, "case {i}");
            }
            assert_eq!(trainer.store().sha256()?, before);
            assert!(trainer.load_latest(&run, &LoadOptions::new()).is_err());
            trainer.load(&good).map(drop)
        });
        for (file, content) in [(shard1, &original1), (manifest, &original)] {
            fs::write(bad.join(file), content).expect("writable");
        }
    }
    let (good, bad) = (run.join("latest"), "../elsewhere");
    fs::write(&good, bad).expect("writable");
    assert!(
        Checkpoint::open(&run)
            .is_err_and(|e| e.to_string().contains("not the name of a checkpoint"))
    );
}

/// Each rank has a disk of its own, and rank 1's copy is damaged where another rank's turn it would be to look.
#[test]
fn ranks_do_not_trust_each_others_disks() {
    for strategy in STRATEGIES {
        let (_guard, root) = folder();
        let to = root.join("of 0");
        ranks(3, move |rank| {
            let (p, q, mut trainer) = model(Sharding::Zero2, &rank)?;
            step(&mut trainer, &p, &q)?;
            trainer.save(&to)
        });
        let copy = |from: &Path, to: &Path| {
            fs::create_dir_all(to).expect("writable");
            for file in fs::read_dir(from).expect("a folder").flatten() {
                fs::copy(file.path(), to.join(file.file_name())).expect("readable");
            }
        };
        let checkpoint = Path::new("step-00000001");
        copy(
            &root.join("of 0").join(checkpoint),
            &root.join("of 1").join(checkpoint),
        );
        for damaged in 0..3 {
            let shard = root
                .join("of 1")
                .join(checkpoint)
                .join(format!("rank-0000{damaged}-of-00003.safetensors"));
            let mut bytes = fs::read(&shard).expect("a file");
            let good = bytes.clone();
            *bytes.last_mut().expect("not empty") ^= 1;
            fs::write(&shard, &bytes).expect("writable");
            let root = root.clone();
            let outcomes = ranks(2, move |rank| {
                let (p, q, mut trainer) = model(strategy, &rank)?;
                let expected = [[0.9f32; 5].to_vec(), [0.9; 3].to_vec()];
                match trainer.load(&root.join(format!("of {}", rank.rank())).join(checkpoint)) {
                    // A file that this rank neither needs nor has the turn of.
                    Ok(_) => {
                        let got = [values(&p), values(&q)];
                        let close = |a: &f32, b: &f32| (a - b).abs() < 2e-3;
                        assert!(
                            got.concat()
                                .iter()
                                .zip(&expected.concat())
                                .all(|(a, b)| close(a, b)),
                            "{got:?}"
                        );
                        Ok(true)
                    }
                    Err(e) => {
                        assert_eq!(parts(Err::<(), _>(e)).1, CheckpointProblem::Corrupt);
                        Ok(false)
                    }
                }
            });
            assert_eq!(outcomes[0], outcomes[1], "all ranks alike");
            if strategy == Sharding::Ddp {
                assert!(!outcomes[0], "every rank reads everything");
            }
            fs::write(&shard, good).expect("writable");
        }
    }
}

/// More files than ranks that load, and each of them damaged once.
#[test]
fn every_file_is_verified_by_somebody() {
    let (_guard, run) = folder();
    let to = run.clone();
    ranks(5, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero2, &rank)?;
        step(&mut trainer, &p, &q)?;
        trainer.save(&to)
    });
    for damaged in 0..5 {
        let shard = run
            .join("step-00000001")
            .join(format!("rank-0000{damaged}-of-00005.safetensors"));
        let good = fs::read(&shard).expect("a file");
        let mut bytes = good.clone();
        *bytes.last_mut().expect("not empty") ^= 1;
        fs::write(&shard, &bytes).expect("writable");
        for world_size in [1, 2] {
            let run = run.clone();
            ranks(world_size, move |rank| {
                let (_, _, mut trainer) = model(Sharding::Zero2, &rank)?;
                let (_, problem, message) = parts(trainer.load(&run));
                assert_eq!(problem, CheckpointProblem::Corrupt, "{message}");
                Ok(())
            });
        }
        fs::write(&shard, good).expect("writable");
    }
}

/// A small generator, for positions and bytes.
fn numbers(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as usize % below.max(1)
    }
}

/// Signs a manifest again, as an attacker or a very unlucky disk would.
fn sign(text: &str) -> String {
    let Some(at) = text.rfind("\"sha256\": \"").map(|at| at + 11) else {
        return text.to_string();
    };
    let Some(rest) = text.get(at + 64..) else {
        return text.to_string();
    };
    let zeros = format!("{}{}{rest}", &text[..at], "0".repeat(64));
    let digest: String = Sha256::digest(&zeros)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    format!("{}{digest}{rest}", &text[..at])
}

fn mutate(bytes: &mut Vec<u8>, next: &mut impl FnMut(usize) -> usize) {
    match next(8) {
        0 => bytes.truncate(next(bytes.len())),
        1 => bytes.extend((0..next(40)).map(|i| i as u8)),
        2 if !bytes.is_empty() => {
            let at = next(bytes.len());
            bytes.remove(at);
        }
        // Digits become other digits, so that the file stays readable and lies.
        3..=5 => {
            let digits: Vec<usize> = (0..bytes.len())
                .filter(|i| bytes[*i].is_ascii_digit())
                .collect();
            if !digits.is_empty() {
                bytes[digits[next(digits.len())]] = b'0' + next(10) as u8;
            }
        }
        _ if !bytes.is_empty() => {
            let at = next(bytes.len());
            bytes[at] ^= 1 << next(8);
        }
        _ => {}
    }
}

/// Random damage: an error on all ranks and nothing changed, or, where the damage undid itself, the right values.
#[test]
fn random_damage_is_never_loaded() {
    let (_guard, run) = folder();
    let to = run.clone();
    let expected = same_on_all(ranks(2, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero2, &rank)?;
        step(&mut trainer, &p, &q)?;
        trainer.save(&to)?;
        trainer.store().sha256()
    }));
    let checkpoint = run.join("step-00000001");
    let files: Vec<PathBuf> = fs::read_dir(&checkpoint)
        .expect("a folder")
        .flatten()
        .map(|e| e.path())
        .collect();
    assert_eq!(files.len(), 3);
    let originals: Vec<Vec<u8>> = files.iter().map(|f| fs::read(f).expect("a file")).collect();
    let latest = run.clone();
    // One world for all attempts: ranks meet before and after each damage.
    ranks(2, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero1, &rank)?;
        step(&mut trainer, &p, &q)?;
        step(&mut trainer, &p, &q)?;
        let before = trainer.store().sha256()?;
        let (mut refused, mut next) = (0, numbers(1));
        for attempt in 0..600 {
            let file = next(3);
            let mut bytes = originals[file].clone();
            for _ in 0..=next(3) {
                mutate(&mut bytes, &mut next);
            }
            let swapped = attempt % 50 == 49;
            if rank.rank() == 0 {
                fs::write(&files[file], &bytes).expect("writable");
                if swapped {
                    fs::write(&files[file], &originals[(file + 1) % 3]).expect("writable");
                }
            }
            rank.comm().barrier()?;
            match trainer.load(&latest) {
                Ok(_) => {
                    assert!(bytes == originals[file] && !swapped, "attempt {attempt}");
                    assert_eq!(trainer.store().sha256()?, expected, "attempt {attempt}");
                    step(&mut trainer, &p, &q)?;
                }
                Err(Error::Checkpoint { .. }) => refused += 1,
                Err(other) => panic!("attempt {attempt}: {other:?}"),
            }
            if refused == attempt + 1 {
                assert_eq!(trainer.store().sha256()?, before);
            }
            rank.comm().barrier()?;
            if rank.rank() == 0 {
                fs::write(&files[file], &originals[file]).expect("writable");
            }
        }
        assert!(refused > 500, "{refused}");
        trainer.load(&latest).map(drop)
    });
}

/// A shard whose pieces leave a gap, overlap, or are of another parameter, with checksums that fit.
#[test]
fn pieces_that_do_not_fit_together_are_refused() {
    let (_guard, run) = folder();
    let to = run.clone();
    ranks(2, move |rank| model(Sharding::Zero2, &rank)?.2.save(&to));
    let checkpoint = run.join("step-00000000");
    let (manifest, shard) = (
        checkpoint.join("manifest.json"),
        checkpoint.join("rank-00001-of-00002.safetensors"),
    );
    let (text, bytes) = (
        fs::read_to_string(&manifest).expect("text"),
        fs::read(&shard).expect("a file"),
    );
    let digest = |bytes: &[u8]| -> String {
        Sha256::digest(bytes)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect()
    };
    for (from, to) in [
        ("p@3..5/value", "p@2..4/value"),
        ("p@3..5/exp_avg\"", "p@4..6/exp_avg\""),
        ("q@2..3/value", "r@2..3/value"),
    ] {
        let found = bytes.windows(from.len()).position(|w| w == from.as_bytes());
        let header = found.unwrap_or_else(|| panic!("no {from}"));
        let mut changed = bytes.clone();
        changed[header..header + from.len()].copy_from_slice(to.as_bytes());
        fs::write(&shard, &changed).expect("writable");
        fs::write(
            &manifest,
            sign(&text.replace(&digest(&bytes), &digest(&changed))),
        )
        .expect("writable");
        let run = run.clone();
        ranks(2, move |rank| {
            let (_, problem, message) = parts(model(Sharding::Zero1, &rank)?.2.load(&run));
            assert_eq!(problem, CheckpointProblem::Corrupt);
            assert!(
                message.contains("exactly once") || message.contains("does not list"),
                "{message}"
            );
            Ok(())
        });
    }
    // Settings that no trainer takes.
    fs::write(&shard, &bytes).expect("writable");
    fs::write(
        &manifest,
        sign(&text.replace("\"lr\": 0.1", "\"lr\": -0.1")),
    )
    .expect("writable");
    ranks(2, move |rank| {
        let saved = LoadOptions::new().with_hyper_parameters(dp_core::HyperParameters::Saved);
        let (_, problem, message) = parts(model(Sharding::Zero1, &rank)?.2.load_with(&run, &saved));
        assert_eq!(problem, CheckpointProblem::HyperParameters);
        assert!(message.contains("lr"), "{message}");
        Ok(())
    });
}

/// Damage with fitting checksums, which only the checks behind them can see: no panic, the same answer on all ranks.
#[test]
fn damage_that_is_signed_does_not_panic() {
    let (_guard, run) = folder();
    let to = run.clone();
    ranks(2, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero2, &rank)?;
        step(&mut trainer, &p, &q)?;
        trainer.save(&to)
    });
    let checkpoint = run.join("step-00000001");
    let (manifest, shard) = (
        checkpoint.join("manifest.json"),
        checkpoint.join("rank-00001-of-00002.safetensors"),
    );
    let text = fs::read_to_string(&manifest).expect("text");
    let bytes = fs::read(&shard).expect("a file");
    let old = Checkpoint::open(&run).expect("complete").manifest().ranks[1].clone();
    let header_len =
        8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")))
            .expect("small");
    ranks(2, move |rank| {
        let (mut refused, mut next) = (0, numbers(2));
        for attempt in 0..400 {
            let (mut text, mut shard_bytes) = (text.clone(), bytes.clone());
            if attempt % 2 == 0 {
                let mut mutated = text.into_bytes();
                mutate(&mut mutated, &mut next);
                text = String::from_utf8_lossy(&mutated).into_owned();
            } else {
                let mut header = shard_bytes[..header_len].to_vec();
                mutate(&mut header, &mut next);
                shard_bytes.splice(..header_len, header);
                let digest: String = Sha256::digest(&shard_bytes)
                    .iter()
                    .map(|b| format!("{b:02x}"))
                    .collect();
                text = text.replace(&old.sha256, &digest);
                text = text.replace(
                    &format!("\"bytes\": {}", old.bytes),
                    &format!("\"bytes\": {}", shard_bytes.len()),
                );
            }
            if rank.rank() == 0 {
                fs::write(&manifest, sign(&text)).expect("writable");
                fs::write(&shard, &shard_bytes).expect("writable");
            }
            rank.comm().barrier()?;
            let (_, _, mut trainer) = model(Sharding::Zero1, &rank)?;
            match trainer.load(&run) {
                Ok(_) => {}
                Err(Error::Checkpoint { .. }) => refused += 1,
                Err(other) => panic!("attempt {attempt}: {other:?}"),
            }
            rank.comm().barrier()?;
        }
        assert!(
            (200..400).contains(&refused),
            "{refused}: some damage is signed well, e.g. another step number"
        );
        Ok(())
    });
}

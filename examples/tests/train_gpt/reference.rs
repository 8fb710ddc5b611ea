use std::path::Path;

use crate::support::Result;

/// The page of the book is what the types say; `UPDATE_REFERENCE=1` writes it anew.
#[test]
fn the_reference_page_is_made_from_the_types() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/config-reference.md");
    let page = dp_examples::train::config::reference_page();
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::write(&path, &page)?;
    }
    let written = std::fs::read_to_string(&path)?;
    assert!(
        written == page,
        "docs/src/config-reference.md is old: UPDATE_REFERENCE=1 cargo test --workspace reference_page"
    );
    Ok(())
}

/// The configurations that come with the programs are read, and fit their models.
#[test]
fn configurations_in_the_repository_are_good() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    let mut count = 0;
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.file_name() == Some("finetune.json".as_ref()) {
            continue; // Its model is a folder; tests/finetune.rs reads it.
        }
        let config = dp_examples::train::config::TrainConfig::from_file(&path, &[], None)?;
        for ranks in [1, 2, 4] {
            config.deepspeed.batch_sizes(ranks)?;
        }
        config.model.with_vocab_size(256)?.validate()?;
        count += 1;
    }
    assert!(count >= 2);
    Ok(())
}

def write_report(plan, root, records):
    return f"{len(records)} runs"

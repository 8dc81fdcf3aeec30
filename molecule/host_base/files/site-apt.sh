#!/bin/sh
# A site's apt mirror with two packages, the first of which recommends the second and starts a daemon, as Debian's do.
set -e
cd /srv/site-apt
for name in site-toolchain site-extra; do
	mkdir -p "$name/DEBIAN"
	{
		printf 'Package: %s\nVersion: 1\nArchitecture: all\nMaintainer: site <site@localhost>\n' "$name"
		[ $name = site-extra ] || echo 'Recommends: site-extra'
		echo "Description: $name"
	} >"$name/DEBIAN/control"
	if [ $name = site-toolchain ]; then
		mkdir -p $name/lib/systemd/system
		printf '[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n' \
			>$name/lib/systemd/system/site-daemon.service
		printf '#!/bin/sh\ndeb-systemd-helper enable site-daemon.service\ndeb-systemd-invoke start site-daemon.service\n' \
			>$name/DEBIAN/postinst
		chmod 755 $name/DEBIAN/postinst
	fi
	dpkg-deb --build --root-owner-group "$name" "$name.deb" >&2
	cat "$name/DEBIAN/control"
	printf 'Filename: ./%s.deb\nSize: %s\n' "$name" "$(stat -c %s "$name.deb")"
	printf 'SHA256: %s\n\n' "$(sha256sum "$name.deb" | cut -d ' ' -f 1)"
done >Packages.new
mv Packages.new Packages
